"""The bars that only a GPU can prove, and the predictions for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.kernels.cases import FP8, IN_FORMAT, MODEL, NEW_TOKENS, Case
from benchmarks.predict.hardware import COPY_SHARE, EDGE_MICROSECONDS
from kvc_trt.methods.base.parameters import DEFAULT
from kvc_trt.profile.accelerators import HOPPER, Accelerator
from kvc_trt.profile.floor import StepCost, floor_seconds
from kvc_trt.profile.model_size import prefill_operations, weight_bytes
from kvc_trt.profile.traffic import row_traffic

OTHER_LAUNCHES = 7
"""ASSUMED launches of a layer beside attention, which rotates: four products, two norms, activation."""
ROTATION_MICROSECONDS = 0.6
"""Time that rotation adds to attention's first launch at batch 8 and 32, by the same model; 0.2 in clusters: a bound.

docs/decisions/0031-rotation-in-the-step.md says how it was found."""
KERNELS = "python -m benchmarks.kernels"
STEP = "python -m benchmarks.torch.backend"
Snapshot = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One bar at one case, on one GPU."""

    text: str
    case: str
    gpu: str
    limit: float
    at_most: bool
    unit: str
    """"us" or "%"."""
    predicted: float
    command: str
    """The command that measures it."""
    of_published: float | None = None
    """The predicted share of a floor at the published bandwidth, which is stricter; None of other bars."""

    @property
    def met(self) -> bool:
        """True if the prediction meets the bar, which is no proof."""
        return self._meets(self.predicted)

    @property
    def met_of_published(self) -> bool:
        """`met`, judged by the floor at the published bandwidth if there is one."""
        return self.met if self.of_published is None else self._meets(self.of_published)

    def _meets(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


def bars(snapshot: Snapshot) -> Iterator[Bar]:
    """Yield every bar at the cases of the snapshot, on every GPU."""
    for gpu in HOPPER:
        for call in snapshot["calls"]:
            of_call = {"hybrid": _step_bars, "dense": _dense_bars, "compact": _compaction_bars}[call["operation"]]
            yield from (_format_bars if call["policy"] in IN_FORMAT.values() else of_call)(snapshot, call, gpu)


def _step_bars(snapshot: Snapshot, call: Snapshot, gpu: Accelerator) -> Iterator[Bar]:
    case = _case(call)
    attention = call["gpus"][gpu.name]["predicted_us"]
    if case.batch <= 8:
        yield Bar("score + select + attend, CUDA graph", case_text(call), gpu.name, 15, True, "us", attention, KERNELS)
        for selection in _kernels(snapshot, call, "select_tokens"):  # none where it is one kernel with the scores
            top_k = selection["gpus"][gpu.name]["predicted_us"]
            yield Bar("of which top-k", case_text(call), gpu.name, 5, True, "us", top_k, KERNELS)
    share = 100 * floor_of_step(case, gpu) / predicted_step(case, gpu, attention)
    limit = 60 if case.batch == 1 else 75
    text, of_published = "sparse decode step, share of its floor", COPY_SHARE * share
    yield Bar(text, case_text(call), gpu.name, limit, False, "%", share, STEP, of_published)


def floor_of_step(case: Case, gpu: Accelerator) -> float:
    """Return the floor of the whole model's step in microseconds, at the bandwidth assumed for the GPU's memory.

    Measurements are compared with the bandwidth that it is found to reach (`benchmarks.gpu.device.Bandwidths`), not the
    published one.
    """
    cache = row_traffic(MODEL, case.parameters, case.item_bytes, case.prompt, NEW_TOKENS // 2)
    cost = StepCost(weight_bytes(MODEL, "bf16").per_step, cache.bytes)
    return 1e6 * floor_seconds(cost, case.batch, COPY_SHARE * gpu.bandwidth)


def predicted_step(case: Case, gpu: Accelerator, attention: float) -> float:
    """Weights at the bandwidth of a long copy, attention that rotates, the edges of other launches, in microseconds."""
    weights = 1e6 * weight_bytes(MODEL, "bf16").per_step / (COPY_SHARE * gpu.bandwidth)
    layer = attention + ROTATION_MICROSECONDS + OTHER_LAUNCHES * EDGE_MICROSECONDS
    return weights + MODEL.num_hidden_layers * layer


def _dense_bars(_: Snapshot, call: Snapshot, gpu: Accelerator) -> Iterator[Bar]:
    case = _case(call)
    if case.batch * case.context >= 65536:
        of_published = 100 * call["gpus"][gpu.name]["share_of_floor"]
        text, share = "dense attention, share of its floor", of_published / COPY_SHARE
        yield Bar(text, case_text(call), gpu.name, 85, False, "%", share, KERNELS, of_published)


def _compaction_bars(_: Snapshot, call: Snapshot, gpu: Accelerator) -> Iterator[Bar]:
    case, times = _case(call), call["gpus"][gpu.name]
    share = 100 * times["share_of_floor"] / COPY_SHARE
    yield Bar("compaction, share of copy bandwidth", case_text(call), gpu.name, 70, False, "%", share, KERNELS)
    if case.batch == 1:
        prefill = 1e6 * prefill_operations(MODEL, case.prompt) / gpu.flops_16bit / MODEL.num_hidden_layers
        share = 100 * times["predicted_us"] / prefill
        yield Bar("compaction, share of prefill at its floor", case_text(call), gpu.name, 3, True, "%", share, KERNELS)


def _format_bars(snapshot: Snapshot, call: Snapshot, gpu: Accelerator) -> Iterator[Bar]:
    """Yield the bars of the attention kernel alone: a format exists to read fewer bytes, and this kernel reads them."""
    (own,) = _kernels(snapshot, call, "sparse_attention_in_format")
    (exact,) = _kernels(snapshot, {**call, "policy": DEFAULT}, "sparse_attention")
    predicted, in_16_bit = (one["gpus"][gpu.name]["predicted_us"] for one in (own, exact))
    if call["operation"] == "hybrid":
        share = 100 * predicted / in_16_bit
        yield Bar("sparse attention, share of 16 bit", case_text(call), gpu.name, 60, True, "%", share, KERNELS)
    elif call["policy"] == IN_FORMAT["fp8"]:
        yield Bar("dense attention in fp8", case_text(call), gpu.name, 190, True, "us", predicted, KERNELS)


def _case(call: Snapshot) -> Case:
    from benchmarks.predict.snapshot import BUDGETS, CONTEXT

    return Case(call["batch"], CONTEXT, call["budget"] or BUDGETS[0], policy=call["policy"])


def case_text(entry: Snapshot) -> str:
    """Return the case of a call or a kernel in words; older predictions know only the default policy."""
    budget = f", budget {entry['budget']}" if entry["budget"] else ""
    return f"batch {entry['batch']}{budget}{storage_text(entry)}"


def storage_text(entry: Snapshot) -> str:
    """Return how an entry's cache differs from one in 16 bit, after a comma."""
    names = {FP8: ", fp8 bounds"} | {policy: f", cache in {name}" for name, policy in IN_FORMAT.items()}
    return names.get(entry.get("policy", DEFAULT), "")


def _kernels(snapshot: Snapshot, call: Snapshot, name: str) -> list[Snapshot]:
    """Return the entries of that kernel in a call: one, or none."""
    keys = ("operation", "batch", "budget", "policy")
    same = (one for one in snapshot["kernels"] if all(one[key] == call[key] for key in keys))
    return [one for one in same if one["kernel"] == name]
