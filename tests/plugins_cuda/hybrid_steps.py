"""Decode steps for the tests of kvc_hybrid_attention, and a library's results on them."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.cases import StepCase, step_case

GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
PAGES = (1, 2, 3, 4, 5, 7, 16)


@st.composite
def steps(draw: Any, dtype: torch.dtype) -> StepCase:
    """Rows that end around page boundaries, inactive rows, exact ties, heads of opposite sign, zero channels, both
    types of bounds, any number of last tokens that are read in any case."""
    group, kv_heads, page = draw(st.sampled_from(GROUPS)), draw(st.integers(1, 2)), draw(st.sampled_from(PAGES))
    size = draw(st.sampled_from((16, 24, 32, 40, 64, 80, 96, 128, 256)))
    capacity = draw(st.integers(1, 200))
    boundary = st.builds(lambda j, off: j * page + off, st.integers(0, -(-capacity // page)), st.integers(-1, 1))
    length = st.one_of(st.integers(0, capacity - 1), boundary.map(lambda x: min(max(x, -1), capacity)))
    case = step_case(
        lengths=draw(st.lists(length, min_size=1, max_size=3)), heads=group * kv_heads, kv_heads=kv_heads, size=size,
        capacity=capacity, page=page, top_r=draw(st.one_of(st.just(size), st.integers(1, size))),
        top_k=draw(st.integers(1, capacity)), token_budget=draw(st.one_of(st.just(0), st.integers(0, capacity + 3))),
        dense_until=draw(st.one_of(st.just(0), st.integers(0, capacity + 3))), dtype=dtype,
        seed=draw(st.integers(0, 2**31)), ties=draw(st.booleans()), opposite=group > 1 and draw(st.booleans()),
        fp8=draw(st.booleans()), recent=draw(st.one_of(st.just(0), st.integers(0, capacity))),
    )  # fmt: skip
    if draw(st.booleans()):
        case.query[:, :, draw(st.integers(0, size - 1)) :: 3] = 0
    return case


def small(**changes: Any) -> StepCase:
    """Return a step whose long rows select: 2 KV heads of 4 query heads, pages of 3, 101 slots."""
    settings_ = {"lengths": (100, 64, 10), "heads": 8, "size": 64, "capacity": 101, "page": 3, "top_r": 23, "top_k": 16}
    return step_case(**(settings_ | {"token_budget": 16} | changes))


def run(library: KernelLibrary, case: StepCase) -> tuple[StepCase, Tensor, Tensor]:
    """(the case after the step, output, selected), on the CPU; the case itself stays as it is."""
    moved = case.to(library.device_type)
    output, selected = library.hybrid_attention(**moved.arguments())
    assert selected is not None
    return moved.to("cpu"), output.cpu(), selected.cpu()


def selected_tokens(library: KernelLibrary, case: StepCase) -> list[list[list[int]]]:
    _, _, selected = run(library, case)
    return [[[x for x in head if x >= 0] for head in row] for row in selected.tolist()]


def reference_tokens(case: StepCase) -> list[list[list[int]]]:
    _, selected = reference_ops.compute("hybrid_attention", case.to("cpu").arguments())
    return [[[x for x in head if x >= 0] for head in row] for row in selected.tolist()]


def state_of(case: StepCase) -> dict[str, Tensor]:
    return {"k_cache": case.k_cache, "v_cache": case.v_cache, "bounds": case.bounds}


def tensors_of(case: StepCase) -> dict[str, Tensor]:
    return {name: value for name, value in case.arguments().items() if isinstance(value, Tensor)}


def launches_of(library: KernelLibrary, case: StepCase) -> list[tuple[str, tuple[int, ...]]]:
    launches = library.launches_of(lambda: run(library, case))
    return [(launch.name.decode(), tuple(launch.grid)) for launch in launches]


def page_blocks(library: KernelLibrary, case: StepCase) -> int:
    return dict(launches_of(library, case))["page_scores"][0]
