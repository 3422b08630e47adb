"""The GPU memory of a TensorRT engine before there is one: what it is for, and whether it fits known GPUs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from kvc_trt.backends.tensorrt.memory import DevicePlan, fits_by, modelled_engine, plan_memory, remedies, sizes_for
from kvc_trt.backends.tensorrt.profiles import prefill_profiles
from kvc_trt.engine.request import compute_dtype
from kvc_trt.graph.state import state_tensors
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.floor import ACCELERATORS, USABLE_MEMORY
from kvc_trt.profile.model_size import weight_bytes


def plan_device(model: ModelConfig, parameters: PolicyParameters, weights: str, rows: int) -> DevicePlan:
    """The memory of an engine built for `rows` rows, with all of them active; `weights` is the weight format."""
    dtype = compute_dtype(weights)
    computing = replace(model, dtype=dtype)
    profiles = prefill_profiles(parameters.max_input_len, rows)
    engine = modelled_engine(computing, parameters, weight_bytes(model, weights).resident, profiles, rows)
    state = state_tensors(model, parameters, dtype)
    return plan_memory(model.vocab_size, state, engine, sizes_for(profiles, rows))


def device_memory(model: ModelConfig, parameters: PolicyParameters, weights: str, rows: int) -> dict[str, Any]:
    """`plan_device` as plain data, held against the usable memory of known GPUs."""
    plan = plan_device(model, parameters, weights, rows)
    return {
        "rows": rows,
        "prompts_prefilled_at_once": plan.sizes.prefill_rows,
        "total_bytes": plan.total,
        "bytes_per_further_row": plan.row_bytes,
        "lines": [asdict(line) for line in plan.lines],
        "caches": [asdict(line) for line in plan.caches],
        "gpus": [_on(plan, gpu.name, round(USABLE_MEMORY * gpu.memory)) for gpu in ACCELERATORS],
    }


def _on(plan: DevicePlan, name: str, usable: int) -> dict[str, Any]:
    left = fits_by(plan, usable)
    return {
        "gpu": name,
        "usable_bytes": usable,
        "fits_by_bytes": left,
        "what_helps": remedies(plan, -left) if left < 0 else [],
    }
