"""Memory by kind: what a model of it says, and beside it what was allocated or seen."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.profile.model_size import cache_itemsize, weight_bytes
from kvc_trt.profile.traffic import cache_bytes

if TYPE_CHECKING:
    from kvc_trt.engine.program import Program
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
    """Weights, cache and what is stored beside it for `rows` rows; the executor's state must be allocated."""
    program, bench, executor = subject.program, subject.bench, subject.executor
    modelled = cache_bytes(program.model, program.parameters, cache_itemsize(weight_format(program.weights_path)))
    rotary = _FLOAT32 * program.model.head_size * program.parameters.max_sequence_len
    bounds = bench.bounds_bytes(executor)
    lines = [
        MemoryLine(
            "weights",
            bench.weight_copies * (weight_bytes(program.model, bench.weight_format(program)).resident + rotary),
            *bench.weight_bytes(executor),
        ),
        MemoryLine("cache", rows * modelled.keys_values, executor.state_bytes() - bounds, "allocated buffers"),
    ]
    if modelled.page_bounds:
        kind = "page bounds" if program.parameters.has_pages else "beside keys"
        lines.append(MemoryLine(kind, rows * modelled.page_bounds, bounds, "allocated buffers"))
    return lines


def prefill_line(subject: Subject, peak: Peak, rows: int, context: int) -> MemoryLine:
    """What a prefill of `rows` prompts of `context` tokens needed for a while, beside what it should need."""
    block = subject.executor.limits.prompt_block
    modelled = subject.bench.prefill_bytes(subject.program, rows, -(-context // block) * block)
    return MemoryLine("prefill", modelled, peak.above, peak.how)


def weight_format(weights_path: Path) -> str:
    """The format the weights of a file are stored in."""
    from kvc_trt.graph.weights import GraphWeights

    return GraphWeights(weights_path).precision


def prefill_memory(program: Program, rows: int, tokens: int) -> float:
    """Bytes a prefill of the graph needs beyond the weights at its largest moment; `tokens`: the padded prompt length.

    The caches it gives out, the residual stream, and whichever is larger of attention (queries, keys and values in two
    layouts; one block's scores, masked scores and weights; its output in blocks and in order) and of the gated MLP.
    """
    from kvc_trt.operators import PROMPT_BLOCK

    model, itemsize = program.model, cache_itemsize(weight_format(program.weights_path))
    positions = rows * tokens
    queries = positions * model.num_attention_heads * model.head_size
    keys = positions * model.num_key_value_heads * model.head_size
    scores = rows * model.num_attention_heads * PROMPT_BLOCK * tokens
    attention = 4 * queries + 4 * keys + 3 * scores
    feed_forward = 3 * positions * model.intermediate_size
    workspace = _FLOAT32 * (2 * positions * model.hidden_size + max(attention, feed_forward))
    return rows * cache_bytes(model, program.parameters, itemsize).total + workspace


@dataclass
class Peak:
    """Resident bytes of this process around a piece of work."""

    before: int
    highest: int = field(default=0)
    how: str = "resident memory above rest, sampled every 2 ms"
    """What the figures are."""

    @property
    def above(self) -> int:
        """What the work needed beyond what was there before it."""
        return max(0, self.highest - self.before)


@contextmanager
def watch_memory() -> Iterator[Peak]:
    """Sample the process's resident memory every two milliseconds while the block runs."""
    import psutil

    process = psutil.Process()
    _return_free_memory()
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


def _return_free_memory() -> None:
    """Give what the allocator keeps for later back to the system, so that it does not hide what is needed next."""
    with suppress(OSError, AttributeError):  # no glibc: the figure is then a lower bound
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_resident_bytes() -> int:
    """Highest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
