"""Device memory of an engine, planned once, before anything is allocated: what for, how much, and whether it fits.

Everything that stays (weights, caches, bounds, buffers, activations) is counted; nothing is allocated while rows run.
BufferSizes of caches and buffers are exact. Weights and activations are modelled where there is no engine yet, and the
engine's own figures take their place once it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvc_trt.backends.tensorrt.profiles import TOKENS_PER_PREFILL, Profile
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import StateTensor
from kvc_trt.sizes import readable_size

ALIGNMENT = 512
"""Of every region, bytes: TensorRT demands 256 of tensors, and the device's texture alignment of its own memory."""
STAGED = "staged "
"""Before the name of a state tensor: the region that a prefill writes it to."""
STAGED_STATE = "state of prompts being prefilled"
ACTIVATIONS, BUFFERS = "activations and workspace", "token, length and logit buffers"
GRAPH_BYTES = 8 << 20
"""Assumed for one batch size: its CUDA graph and its execution context."""
STAGED_SHARE = 8
"""One row in so many can be prefilled at a time (at least one): each takes the memory of another row of caches."""
_INT64, _INT32, _FLOAT32 = 8, 4, 4


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one kind of device memory."""

    kind: str
    bytes: int
    known: str
    """Where the figure is from: `exact`, `modelled`, `assumed`, or `engine`, which was asked."""


@dataclass(frozen=True)
class CacheLine:
    """Consecutive layers whose caches have the same shape."""

    first_layer: int
    last_layer: int
    slots: int
    pages: int
    """0: no page bounds."""
    bytes_per_row: int
    """Of one of the layers: keys, values and bounds."""


@dataclass(frozen=True)
class BufferSizes:
    """How much is to run at once."""

    rows: int
    prefill_rows: int
    """Most prompts of one prefill run."""
    prefill_tokens: int
    """Most padded tokens of one prefill run, all its prompts together."""


@dataclass(frozen=True)
class DevicePlan:
    """The memory of one engine on one GPU."""

    sizes: BufferSizes
    lines: tuple[MemoryLine, ...]
    caches: tuple[CacheLine, ...]
    row_bytes: int
    """What one more row takes: its caches, its place in the small buffers, its CUDA graph."""

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return sum(line.bytes for line in self.lines)

    def of(self, *kinds: str) -> int:
        """Bytes of some kinds."""
        return sum(line.bytes for line in self.lines if line.kind in kinds)


@dataclass(frozen=True)
class EngineBytes:
    """What only an engine knows."""

    prefill_weights: int
    decode_weights: int
    activations: int
    """Of the larger of the two graphs: they never run at the same time and share it."""
    known: str


@dataclass(frozen=True)
class Region:
    """A part of the one block that is allocated for an engine's rows."""

    offset: int
    size: int


def plan_memory(vocab_size: int, state: Sequence[StateTensor], engine: EngineBytes, sizes: BufferSizes) -> DevicePlan:
    """Everything that is on the GPU while `sizes.rows` rows decode and prompts are prefilled."""
    caches = len({tensor.cache for tensor in state})
    bytes_of: dict[str, int] = {}
    for name, size in regions(vocab_size, caches, state, sizes, engine.activations):
        kind = _kind_of(name)
        bytes_of[kind] = bytes_of.get(kind, 0) + aligned(size)
    lines = (
        MemoryLine("weights of decode", engine.decode_weights, engine.known),
        MemoryLine("weights of prefill", engine.prefill_weights, engine.known),
        *(MemoryLine(kind, size, engine.known if kind == ACTIVATIONS else "exact") for kind, size in bytes_of.items()),
        MemoryLine("CUDA graphs", sizes.rows * GRAPH_BYTES, "assumed"),
    )
    row = sum(tensor.bytes_per_row() for tensor in state) + row_buffer_bytes(vocab_size, caches) + GRAPH_BYTES
    return DevicePlan(sizes, tuple(line for line in lines if line.bytes), cache_lines(state), row)


def regions(
    vocab_size: int, caches: int, state: Sequence[StateTensor], sizes: BufferSizes, activations: int
) -> list[tuple[str, int]]:
    """Name and bytes of every part of the one block that is allocated, in order."""
    staged = min(sizes.rows, sizes.prefill_rows)
    small = 2 * aligned(_INT64 * sizes.rows) + aligned(_INT64 * caches * sizes.rows)
    return [
        *((tensor.name, sizes.rows * tensor.bytes_per_row()) for tensor in state),
        *((STAGED + tensor.name, staged * tensor.bytes_per_row()) for tensor in state),
        ("step", small),
        ("prompt", aligned(_INT64 * sizes.prefill_tokens) + aligned(_INT64 * staged)),
        ("logits", sizes.rows * vocab_size * _FLOAT32),
        ("best", sizes.rows * _INT32),
        ("lengths", caches * staged * _INT64),
        ("activations", activations),
    ]


def sizes_for(prefill: Sequence[Profile], rows: int) -> BufferSizes:
    """The most that runs at once: `rows` rows in decode, and as many prompts as profiles and memory allow."""
    staged = min(max(1, rows // STAGED_SHARE), max(profile.batch.largest for profile in prefill))
    tokens = max(min(staged, p.batch.largest) * (p.sequence.largest if p.sequence else 1) for p in prefill)
    return BufferSizes(rows, staged, tokens)


def row_buffer_bytes(vocab_size: int, caches: int) -> int:
    """Bytes that one row takes in the buffers of a run: token, position, a length per cache, logits, best token."""
    return _INT64 * (2 + caches) + _FLOAT32 * vocab_size + _INT32


def cache_lines(state: Iterable[StateTensor]) -> tuple[CacheLine, ...]:
    """The caches' shapes, equal neighbours together."""
    layers = [(layer, *_shape_of(tensors)) for layer, tensors in groupby(state, key=lambda tensor: tensor.layer)]
    lines = []
    for shape, group in groupby(layers, key=lambda entry: entry[1:]):
        alike = [entry[0] for entry in group]
        lines.append(CacheLine(alike[0], alike[-1], *shape))
    return tuple(lines)


def _kind_of(region: str) -> str:
    if region.startswith(STAGED):
        return STAGED_STATE
    if region.startswith("bounds"):
        return "page bounds"
    if "_cache" in region:
        return "caches"
    return ACTIVATIONS if region == "activations" else BUFFERS


def _shape_of(tensors: Iterable[StateTensor]) -> tuple[int, int, int]:
    """Slots, pages and bytes per row of one layer."""
    slots = pages = size = 0
    for tensor in tensors:
        size += tensor.bytes_per_row()
        if tensor.name.startswith("k_cache"):
            slots += tensor.shape[1]
        elif tensor.name.startswith("bounds"):
            pages += tensor.shape[2]
    return slots, pages, size


def aligned(size: int) -> int:
    """Bytes up to where the next region may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(sizes: Iterable[tuple[str, int]]) -> tuple[dict[str, Region], int]:
    """Regions one after another, each aligned, and the bytes of all of them."""
    regions: dict[str, Region] = {}
    offset = 0
    for name, size in sizes:
        regions[name] = Region(offset, size)
        offset += aligned(size)
    return regions, offset


def check_fits(plan: DevicePlan, free_bytes: int, what: str = "the engine") -> None:
    """Raise UnsupportedEnvironment where the plan needs more than is free: by how much, and which settings help."""
    missing = -fits_by(plan, free_bytes)
    if missing <= 0:
        return
    largest = sorted(plan.lines, key=lambda line: -line.bytes)[:3]
    parts = ", ".join(f"{line.kind} {readable_size(line.bytes)}" for line in largest)
    rows = _rows(plan.sizes.rows)
    raise UnsupportedEnvironment(
        f"{what} does not fit the GPU's memory by {readable_size(missing)}: "
        f"expected {readable_size(plan.total)} for {rows} ({parts}), "
        f"found {readable_size(free_bytes)} free",
        hint="; or ".join(remedies(plan, missing)),
    )


def fits_by(plan: DevicePlan, free_bytes: int) -> int:
    """Bytes that would be left; below zero, what is missing."""
    return free_bytes - plan.total


def remedies(plan: DevicePlan, missing: int) -> list[str]:
    """Settings that would make the plan smaller by `missing` bytes, the mildest first; never empty."""
    found = []
    rows = _rows_that_fit(plan, missing)
    if rows >= 1:
        found.append(f"run at most {_rows(rows)} at once")
    if plan.of(ACTIVATIONS) > missing:
        tokens = int(plan.sizes.prefill_tokens * (1 - missing / plan.of(ACTIVATIONS)))
        if tokens >= TOKENS_PER_PREFILL:  # below that many, shorter prompts are prefilled together
            found.append(f"build with --max-input-len {tokens}")
    weights = plan.of("weights of decode", "weights of prefill")
    if weights // 2 >= missing:
        found.append(
            f"build with weights of half the width (now {readable_size(weights)}: each of the two engines has its own)"
        )
    if plan.of("caches", "page bounds") > missing:
        found.append("build with a smaller --token-budget, or a policy that evicts")
    return found or ["a GPU with more memory, or a smaller model"]


def _rows_that_fit(plan: DevicePlan, missing: int) -> int:
    rows, staged = plan.sizes.rows, plan.of(STAGED_STATE)
    spare = rows * plan.row_bytes + staged - missing
    each = staged // plan.sizes.prefill_rows
    fitting = (r for r in range(rows - 1, 0, -1) if r * plan.row_bytes + max(1, r // STAGED_SHARE) * each <= spare)
    return next(fitting, 0)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
