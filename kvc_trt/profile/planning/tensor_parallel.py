"""Plan an engine that is divided among GPUs: the memory of each, and the number of GPUs that a model needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvc_trt.backends.registry import backend as backend_of
from kvc_trt.backends.registry import backends, takers
from kvc_trt.config import BuildConfig
from kvc_trt.engine.parallel import check_parallel
from kvc_trt.engine.resolution.resolve import check_backend_settings
from kvc_trt.engine.resolution.resolved_build import compute_dtype
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sharding import shards
from kvc_trt.profile.accelerators import Accelerator
from kvc_trt.profile.model_size import WeightBytes, cache_itemsize, count_parameters
from kvc_trt.profile.planning.placement import SIDES, PlacedSide, Placement
from kvc_trt.profile.traffic import row_traffic

RANKS_TRIED = (2, 4, 8, 16)
WIDE = "bf16"
"""The weight format that is tried if the plan's format cannot be divided."""


def on_ranks(
    model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig, ranks: int, *, turns: bool
) -> Placement:
    """Return the placement on `ranks` GPUs; InputError for settings that a build would refuse.

    Floors count the bytes that one GPU reads. They leave out sums over the ranks, whose time depends on how the GPUs
    are connected.
    """
    backend = backend_of(_backend(model, parameters, weights, filled, ranks))
    computing = replace(model, dtype=compute_dtype(weights))

    @lru_cache
    def memory(rows: int) -> dict[str, Any]:
        return backend.rank_memory(computing, parameters, rows, ranks, turns=turns)

    one, local, itemsize = memory(1), shards(model, ranks)[0].local, cache_itemsize(weights)
    whole = count_parameters(model)
    resident, read_by_one_row = one["weight_bytes"] + one["rotary_bytes"], one["weight_bytes_read_per_step"]
    size = WeightBytes(resident, read_by_one_row, one["expert_bytes"], whole.expert_share)
    flops = 2.0 * (count_parameters(local).multiplied + whole.lm_head / ranks)
    rules = {"full": parameters.keeping_everything(), "compressed": parameters}

    def side(name: str) -> PlacedSide:
        rule = rules[name]
        read = row_traffic(local, rule.in_the_mean, itemsize, rule.max_input_len, rule.max_output_len).bytes
        return PlacedSide(
            one[name]["cache_bytes_per_row"],
            size.step(read, flops),
            lambda rows: float(memory(rows)[name]["total_bytes"]),
        )

    turns = turns and parameters.no_turn is None
    return Placement(model, local, parameters, weights, turns, ranks, size, {name: side(name) for name in SIDES})


def rank_memory(
    model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig, ranks: int, *, turns: bool
) -> dict[str, Any]:
    """Return the memory of each GPU while the configured rows decode, as plain data."""
    backend = backend_of(_backend(model, parameters, weights, filled, ranks))
    computing = replace(model, dtype=compute_dtype(weights))
    return backend.rank_memory(computing, parameters, filled.max_batch_size, ranks, turns=turns)


def divisions(
    model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig, gpus: Sequence[Accelerator]
) -> Iterator[str | None]:
    """Yield for each GPU the options that divide the engine among the fewest such GPUs that hold it.

    None if no number of `RANKS_TRIED` suffices. If the weights' format cannot be divided, the options say bf16.
    """
    asked = filled.model_copy(update={"backend": "auto"})
    found: list[tuple[str, Placement]] = []
    for kind in dict.fromkeys((weights, WIDE)):
        for ranks in RANKS_TRIED:
            try:
                placement = on_ranks(model, parameters, kind, asked, ranks, turns=True)
            except InputError:
                continue
            found.append((f"--tp {ranks}" if kind == weights else f"--weights {kind} --tp {ranks}", placement))
        if found:
            break
    for gpu in gpus:
        yield next((options for options, placement in found if placement.holds(gpu)), None)


def _backend(model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig, ranks: int) -> str:
    """Return the name of the backend that divides the engine; InputError for settings that a build would refuse."""
    name = takers(("tensor_parallel",))[0].name if filled.backend == "auto" else filled.backend
    settings = {"weights": weights, "backend": name, "tensor_parallel": ranks}
    check_backend_settings(filled.model_copy(update=settings), backends())
    check_parallel(ranks, model, parameters)
    return name
