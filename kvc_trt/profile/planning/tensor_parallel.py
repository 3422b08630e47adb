"""Plan an engine that is divided among GPUs: what each of them holds, and the floor of its part of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvc_trt.backends.registry import backend as backend_of
from kvc_trt.backends.registry import backends, takers
from kvc_trt.config import BuildConfig
from kvc_trt.engine.parallel import check_parallel
from kvc_trt.engine.resolution.resolve import check_backend_settings
from kvc_trt.engine.resolution.resolved_build import compute_dtype
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sharding import shards
from kvc_trt.profile.floor import ACCELERATORS, USABLE_MEMORY, Accelerator, largest_batch
from kvc_trt.profile.model_size import cache_itemsize
from kvc_trt.profile.planning.plan import BATCHES
from kvc_trt.profile.traffic import row_traffic

SIDES = ("full", "compressed")


def plan_ranks(
    model: ModelConfig, parameters: PolicyParameters, weights: str, filled: BuildConfig, ranks: int, *, turns: bool
) -> dict[str, Any]:
    """Return memory and floor of each of `ranks` GPUs; InputError for what a build would refuse.

    Floors count the bytes that one GPU reads. The sums over the ranks come on top: how long they take depends on what
    connects the GPUs, and is not modelled.
    """
    name = takers(("tensor_parallel",))[0].name if filled.backend == "auto" else filled.backend
    check_backend_settings(filled.model_copy(update={"weights": weights, "backend": name}), backends())
    check_parallel(ranks, model, parameters)
    computing = replace(model, dtype=compute_dtype(weights))
    found = backend_of(name).rank_memory(computing, parameters, filled.max_batch_size, ranks, turns=turns)
    local, itemsize = shards(model, ranks)[0].local, cache_itemsize(weights)
    read = {
        side: row_traffic(local, rule, itemsize, rule.max_input_len, rule.max_output_len).bytes
        for side, rule in (("full", parameters.keeping_everything()), ("compressed", parameters))
    }
    return {
        **found,
        "gpus": [_fits(found, gpu) for gpu in ACCELERATORS],
        "speed": [
            {
                "accelerator": gpu.name,
                "batch": batch,
                **{
                    f"{side}_floor_ms": 1e3 * (found["weight_bytes_read_per_step"] + batch * read[side]) / gpu.bandwidth
                    for side in SIDES
                },
            }
            for gpu in ACCELERATORS
            for batch in BATCHES
        ],
    }


def _fits(found: dict[str, Any], gpu: Accelerator) -> dict[str, Any]:
    usable = round(USABLE_MEMORY * gpu.memory)
    fixed = found["weight_bytes"] + found["rotary_bytes"]

    def largest(side: str) -> int:
        """Return the rows that fit beside the work of one prefill."""
        return largest_batch(gpu, fixed, found[side]["cache_bytes_per_row"], found[side]["prefill_bytes"])

    return {
        "gpu": gpu.name,
        "usable_bytes": usable,
        "fits_by_bytes": usable - found["compressed"]["total_bytes"],
        "largest_batch": {side: largest(side) for side in SIDES},
    }
