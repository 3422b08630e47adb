"""Memory by kind: what a model of it says, and beside it what was allocated or seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.models.config import ModelConfig
from kvc_trt.policies.parameters import PolicyParameters
from kvc_trt.profile.model_size import cache_itemsize, weight_bytes
from kvc_trt.profile.traffic import cache_bytes

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.profile.subject import Subject

SAMPLING_SECONDS = 0.002
_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one kind of memory."""

    kind: str
    modelled: float
    measured: float
    how: str
    """What the measured figure is."""

    @property
    def difference_percent(self) -> float:
        """How far the measurement lies above the model."""
        return 100 * (self.measured / self.modelled - 1) if self.modelled else 0.0

    def as_json(self) -> dict[str, Any]:
        """Fields of the result's `memory` section."""
        return {
            "kind": self.kind,
            "modelled_bytes": round(self.modelled),
            "measured_bytes": round(self.measured),
            "difference_percent": self.difference_percent,
            "measured": self.how,
        }


def standing_memory(subject: Subject, rows: int) -> list[MemoryLine]:
    """Weights, cache and page bounds for `rows` rows; the executor's state must be allocated."""
    engine, buffers = subject.engine, subject.executor.buffers
    precision = weight_format(engine)
    modelled = cache_bytes(engine.model, engine.parameters, cache_itemsize(precision))
    rotary = _FLOAT32 * engine.model.head_size * engine.parameters.max_sequence_len
    bounds = sum(buffer.nbytes for name, buffer in buffers.items() if name.startswith("bounds"))
    lines = [
        MemoryLine(
            "weights",
            weight_bytes(engine.model, precision).resident + rotary,
            engine.weights_path.stat().st_size,
            "size of the file",
        ),
        MemoryLine("cache", rows * modelled.keys_values, subject.executor.state_bytes() - bounds, "allocated buffers"),
    ]
    if modelled.page_bounds:
        lines.append(MemoryLine("page bounds", rows * modelled.page_bounds, bounds, "allocated buffers"))
    return lines


def prefill_line(subject: Subject, peak: Peak, rows: int, context: int) -> MemoryLine:
    """What a prefill of `rows` prompts of `context` tokens needed for a while, beside what it should need."""
    engine, block = subject.engine, subject.executor.limits.prompt_block
    padded = -(-context // block) * block
    itemsize = cache_itemsize(weight_format(engine))
    modelled = prefill_memory(engine.model, engine.parameters, rows, padded, itemsize)
    return MemoryLine("prefill", modelled, peak.above, "resident memory above rest, sampled every 2 ms")


def weight_format(engine: Engine) -> str:
    """The format its weights are stored in."""
    from kvc_trt.graph.weights import GraphWeights

    return GraphWeights(engine.weights_path).precision


def prefill_memory(model: ModelConfig, parameters: PolicyParameters, rows: int, tokens: int, itemsize: int) -> float:
    """Bytes a prefill needs beyond the weights at its largest moment; `tokens` is the padded prompt length.

    The caches it gives out, the residual stream, and whichever is larger of attention (queries, keys and values as
    projected, rotated and laid out by head; the output in blocks and in order; a block's scores) and of the gated MLP.
    """
    stream = rows * tokens * model.hidden_size
    queries = rows * tokens * model.num_attention_heads * model.head_size
    keys = rows * tokens * model.num_key_value_heads * model.head_size
    attention = 4 * queries + 4 * keys
    feed_forward = 3 * rows * tokens * model.intermediate_size
    workspace = _FLOAT32 * (2 * stream + max(attention, feed_forward))
    return rows * cache_bytes(model, parameters, itemsize).total + workspace


@dataclass
class Peak:
    """Resident bytes of this process around a piece of work."""

    before: int
    highest: int = field(default=0)

    @property
    def above(self) -> int:
        """What the work needed beyond what was there before it."""
        return max(0, self.highest - self.before)


@contextmanager
def watch_memory() -> Iterator[Peak]:
    """Samples the process's resident memory every two milliseconds while the block runs."""
    import psutil

    process = psutil.Process()
    peak = Peak(process.memory_info().rss)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLING_SECONDS):
            peak.highest = max(peak.highest, process.memory_info().rss)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()
        peak.highest = max(peak.highest, process.memory_info().rss)


def peak_resident_bytes() -> int:
    """Highest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
