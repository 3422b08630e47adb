"""Questions for plugins: fields of real graphs, fields with one mistake, steps on real data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvc_trt.backends.tensorrt.lowering import PLUGINS, lower
from kvc_trt.kernels import use_library
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.ops import kvc
from kvc_trt.kernels.stored_parts import parts_of
from kvc_trt.models.cache_formats import CACHE_FORMATS, CacheFormat
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_TURN
from kvc_trt.operators.dimensions import INT32_MAX
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import CACHE_FORMAT, OF_SOME_CALLS, Operator, part_names, vector_of
from kvc_trt.operators.tensors import FP8_BOUNDS
from kvc_trt.operators.turns.replace import REPLACE_CACHE
from tests.backends.tensorrt.weightless import WITH_AN_ENGINE, weightless_extend, weightless_graphs
from tests.graph.small_models import LLAMA, resolve
from tests.plugins_cuda import cases
from tests.plugins_cuda.test_compact_turn import turn_case
from tests.plugins_cuda.test_turn import BlockCase, block_case

BY_NAME = {operator.name: operator for operator in KERNEL_OPERATORS}
FORMATS = [form for form in CACHE_FORMATS.values() if form.keys is not None]


def _kinds() -> Iterator[tuple[Operator, dict[str, int]]]:
    for operator in KERNEL_OPERATORS:
        fp8 = {FP8_BOUNDS.name: 1} if FP8_BOUNDS in operator.attributes else {}
        numbers: list[dict[str, int]] = [{}, *([fp8] if fp8 else [])]
        if operator.stores:
            # With fp8 and k8v4 it has parts of every kind; with int4 what tells the head size may be codes alone.
            names = ("fp8", "k8v4", *(["int4"] if operator == REPLACE_CACHE else []))
            numbers += [{**fp8, CACHE_FORMAT.name: CACHE_FORMATS[name].code} for name in names]
        yield from ((operator.for_numbers(own), own) for own in numbers)


KINDS = list(_kinds())
"""Every operator, with numbers that change its tensors: of bounds in fp8, and of each format of its caches."""
TYPES = {"INT32": 5, "INT64": 10, "FLOAT32": 1, "INT8": 3, "CHAR": 6}
"""PluginFieldType"""


@dataclass(frozen=True)
class RawField:
    """One field as an engine file or a network might hand it in."""

    name: str
    type: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Malformed:
    """Fields with one mistake, and the reason of the refusal."""

    operator: str
    fields: tuple[RawField, ...]
    reason: str

    @property
    def line(self) -> str:
        return f"kvc plugin: {self.operator}: {self.reason}"


SOME_FORMATS = ("rocketkv", {"kv_cache": "k8v4"}), ("full", {"kv_cache": "int8"}), ("hybrid", {"kv_cache": "fp8"})


@cache
def graph_fields() -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """(operator, attributes) of the plugin nodes of lowered graphs of every policy with an engine, some in formats."""
    found = {}
    bounds = ("rocketkv", {"fp8_bounds": True})
    for policy, own in (*((policy, {}) for policy in WITH_AN_ENGINE), bounds, *SOME_FORMATS):
        parameters = resolve(policy, **({} if policy == "full" else {"skip_layers": 1}), **own)
        graphs = [*weightless_graphs(LLAMA, parameters, "bf16"), weightless_extend(LLAMA, parameters, "bf16")]
        for graph in graphs:
            for node in lower(graph, tensorrt=(11, 4), plugins=PLUGINS).graph.node:
                if node.domain == KVC_DOMAIN:
                    # The parser passes every attribute that a field names.
                    names = {field.name for field in BY_NAME[node.op_type].call_attributes}
                    found[node.op_type, tuple((a.name, a.i) for a in node.attribute if a.name in names)] = None
    return tuple(found)


def good_fields(operator: str, numbers: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """One set of fields of a graph, with other `numbers`; the bounds are of the cache's type unless these say so."""
    fields = dict(next(fields for name, fields in graph_fields() if name == operator))
    fields = {name: value for name, value in fields.items() if name not in {one.name for one in OF_SOME_CALLS}}
    return {**fields, **({FP8_BOUNDS.name: 0} if FP8_BOUNDS.name in fields else {}), **numbers}


def fields_with_defaults(operator: str, fields: Mapping[str, int]) -> dict[str, int]:
    """Return the fields that a plugin made of these keeps, in the order of its attributes."""
    names = [one.name for one in BY_NAME[operator].call_attributes]
    return {name: fields.get(name, 0) for name in names}


def raw(fields: dict[str, int]) -> list[RawField]:
    return [RawField(name, "INT32", (value,)) for name, value in fields.items()]


def malformed_fields(operator: Operator) -> Iterator[Malformed]:
    """Fields with each possible mistake, field by field of the schema."""
    good = good_fields(operator.name)
    assert list(good) == [field.name for field in operator.attributes]
    good = fields_with_defaults(operator.name, good)
    whole, count = raw(good), len(good)

    def make(fields: Sequence[RawField], reason: str) -> Malformed:
        return Malformed(operator.name, tuple(fields), reason)

    yield make([*whole, RawField("more", "INT32", (1,))], f"number of fields: expected {count}, found {count + 1}")
    for index, field in enumerate(operator.call_attributes):
        before, after, value = whole[:index], whole[index + 1 :], good[field.name]

        def replaced(reason: str, *, name=field.name, kind="INT32", values=(value,), before=before, after=after):
            return make([*before, RawField(name, kind, values), *after], reason)

        if field not in OF_SOME_CALLS:  # a node without it means 0
            yield make([*before, *after], f"field {field.name}: missing")
        yield replaced(f"field {field.name}x: unknown", name=f"{field.name}x")
        yield replaced(f"field {field.name.upper()}: unknown", name=field.name.upper())
        span = f"expected {field.least}..{field.most}"
        for wrong in (field.least - 1, field.most + 1, -(2**31), INT32_MAX):
            if -(2**31) <= wrong <= INT32_MAX and not field.least <= wrong <= field.most:
                yield replaced(f"field {field.name}: {span}, found {wrong}", values=(wrong,))
        one = f"field {field.name}: expected one INT32 (type {TYPES['INT32']}, length 1), found"
        for values in ((), (value, value)):
            yield replaced(f"{one} type {TYPES['INT32']}, length {len(values)}", values=values)
        for kind in TYPES:
            if kind != "INT32":
                yield replaced(f"{one} type {TYPES[kind]}, length 1", kind=kind, values=(min(value, 100),))
        if count > 1:
            other = (index + 1) % count
            twice = [*whole[:other], whole[index], *whole[other + 1 :]]
            yield make(twice, f"field {field.name}: given twice")
    if operator in (COMPACT, COMPACT_TURN):
        even = {**good, "pool_kernel": good["pool_kernel"] + 1}
        yield make(raw(even), f"field pool_kernel: expected an odd number, found {even['pool_kernel']}")
        capacity = good["prompt_budget"] - 1
        found = f"expected at most the capacity of {capacity}, found {good['prompt_budget']}"
        yield make(raw({**good, "capacity": capacity}), f"field prompt_budget: {found}")


@cache
def malformed() -> tuple[Malformed, ...]:
    """Malformed fields of every operator."""
    return tuple(case for operator in KERNEL_OPERATORS for case in malformed_fields(operator))


# --- steps on real data ---


@dataclass(frozen=True)
class Step:
    """One call of an operator: its tensors in the order of the schema, and the expected outputs."""

    operator: Operator
    fields: dict[str, int]
    inputs: list[Tensor]
    outputs: list[Tensor]
    """memory that no kernel has written yet, or the input's where the schema says so"""
    expected: list[Tensor]


def compact_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...], *, fp8: bool = False) -> Step:
    case = cases.compact_case(lengths=lengths, heads=6, kv_heads=2, page=3, dtype=dtype, fp8=fp8)
    with use_library(emulation.path):
        expected = kvc.compact(**case.arguments())
    return _step("KvcCompact", case, list(expected))


def hybrid_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...], *, fp8: bool = False) -> Step:
    case = cases.step_case(
        lengths=lengths, heads=6, kv_heads=2, page=3, top_r=5, top_k=12, dense_until=18, dtype=dtype, fp8=fp8
    )
    other = case.to("cpu")
    with use_library(emulation.path):
        output, selected = kvc.hybrid_attention(**other.arguments())
    return _step("KvcHybridAttention", case, [output, other.k_cache, other.v_cache, other.bounds, selected])


def dense_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...]) -> Step:
    case = cases.step_case(lengths=lengths, heads=6, kv_heads=2, dtype=dtype)
    other = case.to("cpu")
    with use_library(emulation.path):
        output = kvc.dense_attention(**other.dense_arguments())
    return _step("KvcDenseAttention", case, [output, other.k_cache, other.v_cache])


def _step(name: str, case, expected: list[Tensor]) -> Step:
    operator = BY_NAME[name].for_numbers(vars(case))
    inputs = [getattr(case, tensor.name) for tensor in operator.inputs]
    named = {tensor.name: value for tensor, value in zip(operator.inputs, inputs, strict=True)}
    outputs = [
        torch.full(tuple(result.shape), -77, dtype=result.dtype) if tensor.alias is None else named[tensor.alias]
        for tensor, result in zip(operator.outputs, expected, strict=True)
    ]
    assert all(tensor.is_contiguous() for tensor in (*inputs, *outputs))
    return Step(
        operator, {field.name: getattr(case, field.name) for field in operator.attributes}, inputs, outputs, expected
    )


def turn_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...], *, fp8: bool = False) -> Step:
    """Return a compaction after a turn in which row i has i + 1 queries that vote."""
    case = turn_case(lengths, [*range(1, len(lengths) + 1)], heads=6, kv_heads=2, page=3, dtype=dtype, fp8=fp8)
    return _computed("KvcCompactTurn", case, emulation)


def rows_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...]) -> Step:
    """Return a compaction after a turn whose rows have budgets and pool kernels of their own."""
    case = turn_case(lengths, [*range(1, len(lengths) + 1)], heads=6, kv_heads=2, page=3, dtype=dtype)
    numbers = range(len(lengths))
    own = {
        "by_length": 1, "prompt_budgets": torch.tensor([12 + 4 * row for row in numbers]),
        "pool_kernels": torch.tensor([1 + 2 * (row % 2) for row in numbers]),
    }  # fmt: skip
    return _computed("KvcCompactTurn", SimpleNamespace(**vars(case), **own), emulation)


def append_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...]) -> Step:
    return _computed("KvcAppendBlock", _block(lengths, dtype), emulation)


def bounds_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...], *, fp8: bool = False) -> Step:
    return _computed("KvcRaiseBounds", _block(lengths, dtype, fp8=fp8), emulation)


def join_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...]) -> Step:
    return _computed("KvcJoinBlock", _block(lengths, dtype), emulation)


def _block(lengths: tuple[int, ...], dtype: torch.dtype, *, fp8: bool = False) -> BlockCase:
    return block_case(lengths, [7, 1, 4][: len(lengths)], dtype=dtype, fp8=fp8)


@dataclass(frozen=True)
class Replaced:
    """State, and the tensors that overwrite it."""

    k_cache: Tensor
    v_cache: Tensor
    slot_positions: Tensor
    bounds: Tensor
    k_kept: Tensor
    v_kept: Tensor
    positions_kept: Tensor
    bounds_kept: Tensor
    fp8_bounds: int = 0


def _replaced(lengths: tuple[int, ...], dtype: torch.dtype, *, fp8: bool = False) -> Replaced:
    tables = []
    for seed in (1, 2):
        case = cases.step_case(lengths=lengths, dtype=dtype, seed=seed, fp8=fp8)
        positions = torch.arange(seed, seed + case.k_cache[..., 0].numel(), dtype=torch.int32)
        tables += [case.k_cache, case.v_cache, positions.reshape(case.k_cache.shape[:3]), case.bounds]
    return Replaced(*tables, int(fp8))


def replace_step(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...]) -> Step:
    return _computed("KvcReplaceCache", _replaced(lengths, dtype), emulation)


def replace_bounds_step(
    emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...], *, fp8: bool = False
) -> Step:
    return _computed("KvcReplaceBounds", _replaced(lengths, dtype, fp8=fp8), emulation)


def _computed(name: str, case, emulation: KernelLibrary) -> Step:
    """Return the step of an operator, and the kernels' result on a copy of it."""
    operator = BY_NAME[name].for_numbers(vars(case))
    names = [tensor.name for tensor in operator.inputs] + [one.name for one in operator.attributes]
    given = {key: value.clone() if isinstance(value := getattr(case, key), Tensor) else value for key in names}
    made = emulation.compute(operator, given)
    return _step(name, case, [made[one.name] if one.alias is None else given[one.alias] for one in operator.outputs])


def in_fp8(make: Callable[..., Step]) -> Callable[..., Step]:
    """Return a function that makes the same step with bounds in fp8."""

    @wraps(make)
    def made(*arguments: Any) -> Step:
        return make(*arguments, fp8=True)

    made.__name__ = f"fp8_{make.__name__}"
    return made


def stored(make: Callable[..., Step], form: CacheFormat) -> Callable[..., Step]:
    """Return a function that makes the same step over caches in a format, with bounds in fp8 where it has bounds."""

    def made(emulation: KernelLibrary, dtype: torch.dtype, lengths: tuple[int, ...]) -> Step:
        bounds = {"fp8": True} if "fp8" in inspect.signature(make).parameters else {}
        exact = make(emulation, dtype, lengths, **bounds)
        given: dict[str, Tensor] = {}
        for tensor, value in zip(exact.operator.inputs, exact.inputs, strict=True):
            vector = vector_of(tensor, form) if tensor.stored else None
            given |= zip(part_names(tensor, vector), parts_of(value.contiguous(), vector), strict=True)
        case = SimpleNamespace(**given, **exact.fields, cache_format=form.code)
        return _computed(exact.operator.name, case, emulation)

    made.__name__ = f"{form.name}_{make.__name__}"
    return made


STEPS = [
    (compact_step, (61, 9, 40)),
    (compact_step, (5, 0)),
    (hybrid_step, (61, 17, 40)),
    (hybrid_step, (70, -1)),
    (dense_step, (61, 9, 40)),
    (dense_step, (70, -1)),
    (turn_step, (61, 9, 40)),
    (rows_step, (61, 9, 40)),
    (append_step, (61, 9, 40)),
    (bounds_step, (61, 9, 40)),
    (join_step, (61, 9, 40)),
    (replace_step, (61, 9, 40)),
    (replace_bounds_step, (61, 9, 40)),
    *((in_fp8(make), (61, 9, 40)) for make in (compact_step, hybrid_step, turn_step, bounds_step, replace_bounds_step)),
]
"""Rows below and above the budget, empty and inactive ones."""
STORING = (
    compact_step, hybrid_step, dense_step, turn_step, append_step, bounds_step, join_step, replace_step
)  # fmt: skip
STEPS += [(stored(make, form), (61, 9, 40)) for make in STORING for form in FORMATS]


def check_same(step: Step) -> None:
    """Assert that every output equals the expected one to the last bit, NaN included."""
    for found, expected in zip(step.outputs, step.expected, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


class Workspace:
    """Scratch memory at an address that is a multiple of 256, with guard bytes after it."""

    GUARD = 4096

    def __init__(self, size: int) -> None:
        self._memory = torch.full((size + self.GUARD + 256,), 0x5A, dtype=torch.uint8)
        start = self._memory.data_ptr()
        self.address = -(-start // 256) * 256
        self._guard = self._memory[self.address - start + size :][: self.GUARD]

    def check(self) -> None:
        assert bool((self._guard == 0x5A).all()), "written past the end of the workspace"
