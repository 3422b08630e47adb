"""Estimate the memory for building an engine from shapes alone, before hours of work, and compare it with what is free.

Host memory was measured with NVIDIA's builder on a CPU (TensorRT-RTX 1.7.1, 305 MB of bf16 weights, both graphs): the
weight file stays mapped, so the system may drop its pages at any time; the builder holds up to 2.0 times its size while
it lays weights out for its kernels; the plan is streamed to disk. Device memory is modelled: no build was measured on a
GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from kvc_trt.backends.tensorrt.building.profiles import (
    Profile,
    SizeRange,
    extend_profiles,
    longest_turn,
    prefill_profiles,
)
from kvc_trt.backends.tensorrt.format import no_turns
from kvc_trt.backends.tensorrt.running.memory import DevicePlan, EngineBytes, fits_by, plan_memory, remedies, sizes_for
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import ITEM_SIZE, StateTensor, state_tensors
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.tensors import VECTOR_PARTS
from kvc_trt.sizes import readable_size

COPIES_IN_BUILDER = 2.0
HOST_BASE_BYTES = 2 << 30
"""Host memory of TensorRT's libraries and kernels, in bytes."""
DEVICE_BASE_BYTES = 1 << 30
"""Device memory of the CUDA context, kernels and timing runs, in bytes."""
FLOAT32 = 4


@dataclass(frozen=True)
class Estimate:
    """Peak memory of building one plan, in bytes."""

    host: int
    """Process memory that cannot be dropped."""
    mapped: int
    """Weights, mapped from their file: read when needed, dropped when memory is short."""
    device: int
    disk: int

    def as_text(self) -> str:
        """Return one line for the build's log."""
        return (
            f"{readable_size(self.host)} of memory (and {readable_size(self.mapped)} of weights mapped from the disk), "
            f"{readable_size(self.device)} on the GPU, {readable_size(self.disk)} on the disk"
        )


@dataclass(frozen=True)
class FreeMemory:
    """Free memory of this machine in bytes; None if unknown."""

    host: int | None
    device: int | None
    device_name: str = "the GPU"


def estimate(
    model: ModelConfig, state: Sequence[StateTensor], graph: str, profiles: Sequence[Profile], weight_file_bytes: int
) -> Estimate:
    """Estimate building the plan of one graph: prefill, decode or extend."""
    if graph == "extend":
        activations = max(turn_bytes(model, state, profile) for profile in profiles)
    else:
        activations = max(activation_bytes(model, profile) for profile in profiles)
    rows = max(profile.batch.largest for profile in profiles)
    caches = rows * sum(tensor.bytes_per_row() for tensor in state)
    return Estimate(
        host=int(COPIES_IN_BUILDER * weight_file_bytes) + HOST_BASE_BYTES,
        mapped=weight_file_bytes,
        device=weight_file_bytes + activations + caches + DEVICE_BASE_BYTES,
        disk=weight_file_bytes,
    )


def activation_bytes(model: ModelConfig, profile: Profile) -> int:
    """Return the bytes of the largest run of prefill or decode.

    fp32 has no fused attention: all scores of a layer are then in memory twice, before and after the softmax.
    """
    total = _layer_bytes(model, profile)
    if model.dtype == "float32" and profile.sequence is not None:
        total += 2 * FLOAT32 * profile.batch.largest * model.num_attention_heads * profile.sequence.largest**2
    return total


def turn_bytes(model: ModelConfig, state: Sequence[StateTensor], profile: Profile) -> int:
    """Return the bytes of the longest turn of a profile, `state` being that of an extend graph.

    Beside the memory of a prompt of that length, it counts the mask of attention, a byte per new token and entry; for a
    turn that is compacted, one layer's stored and new tokens in one table; in fp32 all scores, twice. One layer's codes
    are widened for attention, to fp32 and then to the activations' type, and keys once more for compaction's votes.
    """
    assert profile.sequence is not None
    rows, block, heads = profile.batch.largest, profile.sequence.largest, model.num_attention_heads
    compacted = {tensor.cache for tensor in state if not tensor.in_step}
    vectors = [tensor for tensor in state if tensor.name.partition(".")[0] in VECTOR_PARTS]
    entries = tables = 0
    for cache, parts in groupby(vectors, key=lambda tensor: tensor.cache):
        keys, *others = parts
        kv_heads, slots = keys.shape[:2]
        held = slots + block if cache in compacted else slots
        entries = max(entries, held)
        token = sum(part.bytes_per_row() // slots for part in (keys, *others)) if cache in compacted else 0
        if keys.dtype == "int8":
            votes = FLOAT32 if cache in compacted else 0
            token += kv_heads * model.head_size * (2 * (FLOAT32 + ITEM_SIZE[model.dtype]) + votes)
        tables = max(tables, rows * held * token)
    scores = 2 * FLOAT32 * heads if model.dtype == "float32" else 0
    return _layer_bytes(model, profile) + rows * block * entries * (1 + scores) + tables


def _layer_bytes(model: ModelConfig, profile: Profile) -> int:
    """Return the bytes beside attention: residual stream twice, the wider of attention and MLP, fp32 logits."""
    tokens = profile.largest_tokens
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    attention, feed_forward = heads * model.head_size, 3 * model.intermediate_size
    widest = 2 * model.hidden_size + max(attention, feed_forward)
    return tokens * widest * ITEM_SIZE[model.dtype] + profile.batch.largest * model.vocab_size * FLOAT32


def check_fits(needed: Estimate, free: FreeMemory, what: str) -> None:
    """Raise UnsupportedEnvironment, with the shortfall, if a build needs more memory than is free."""
    for kind, found, expected, hint in (
        ("memory", free.host, needed.host, "build on a machine with more memory, or a smaller --model"),
        (
            f"memory on {free.device_name}",
            free.device,
            needed.device,
            "lower --max-input-len or --max-batch-size, or build on a larger GPU",
        ),
    ):
        if found is not None and found < expected:
            raise UnsupportedEnvironment(
                f"building {what} needs {readable_size(expected)} of {kind}, {readable_size(found)} are free: "
                f"it does not fit by {readable_size(expected - found)}",
                hint=hint,
            )


def modelled_engine(
    model: ModelConfig, parameters: PolicyParameters, weights: float, prefill: Sequence[Profile], rows: int
) -> EngineBytes:
    """Estimate the bytes that the built engine would report; each plan has its own copy of the weights.

    `model` has the type that the engine computes in, `weights` is the size of one copy of the model.
    """
    rotary = FLOAT32 * model.head_size * parameters.max_sequence_len
    copy = round(weights) + rotary
    prompts = max(activation_bytes(model, profile) for profile in prefill)
    # Compaction: votes and the selection's keys for every token and KV head, and as much again to compute them.
    tokens = max(profile.largest_tokens for profile in prefill) if parameters.eviction.evicts else 0
    workspace = 4 * FLOAT32 * model.num_key_value_heads * tokens
    step = activation_bytes(model, Profile(SizeRange(rows, rows, rows)))
    if no_turns(parameters) is not None:
        return EngineBytes(copy, copy, max(prompts + workspace, step), "modelled")
    state = state_tensors(model, parameters, model.dtype, turns=True)
    turns = max(turn_bytes(model, state, profile) for profile in extend_profiles(parameters.max_input_len))
    return EngineBytes(copy, copy, max(prompts + workspace, step, turns), "modelled", extend_weights=copy)


def plan_device(model: ModelConfig, parameters: PolicyParameters, weights: float, rows: int) -> DevicePlan:
    """Plan the memory of an engine that is not built yet, for `rows` active rows.

    `model` has the type that the engine computes in, `weights` is the size of one copy of its weights.
    """
    profiles, takes_turns = prefill_profiles(parameters.max_input_len, rows), no_turns(parameters) is None
    turns = extend_profiles(parameters.max_input_len) if takes_turns else ()
    engine = modelled_engine(model, parameters, weights, profiles, rows)
    state = state_tensors(model, parameters, model.dtype, turns=takes_turns)
    return plan_memory(model.vocab_size, state, engine, sizes_for(profiles, rows, longest_turn(turns)))


def device_memory(
    model: ModelConfig, parameters: PolicyParameters, weights: float, rows: int, gpus: Mapping[str, int]
) -> dict[str, Any]:
    """Return `plan_device` as plain data, compared with the usable bytes of known GPUs."""
    plan = plan_device(model, parameters, weights, rows)
    return {
        "rows": rows,
        "prompts_prefilled_at_once": plan.sizes.prefill_rows,
        "total_bytes": plan.total,
        "bytes_per_further_row": plan.row_bytes,
        "lines": [asdict(line) for line in plan.lines],
        "caches": [asdict(line) for line in plan.caches],
        "gpus": [_on(plan, name, usable) for name, usable in gpus.items()],
    }


def _on(plan: DevicePlan, gpu: str, usable: int) -> dict[str, Any]:
    left = fits_by(plan, usable)
    helps = remedies(plan, -left) if left < 0 else []
    return {"gpu": gpu, "usable_bytes": usable, "fits_by_bytes": left, "what_helps": helps}
