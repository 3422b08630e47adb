"""Plan the device memory of an engine before anything is allocated: the purpose and size of each part, and whether all
fit.

Everything that stays (weights, caches, bounds, buffers, activations) is counted; nothing is allocated while rows run.
Sizes of caches and buffers are exact. Weights and activations are modelled until the engine is loaded and reports them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from kvc_trt.backends.tensorrt.building.profiles import TOKENS_PER_PREFILL, Profile
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import StateTensor
from kvc_trt.sizes import readable_size

ALIGNMENT = 512
"""Alignment of every region in bytes: TensorRT needs 256 for tensors and the texture alignment for its workspace."""
STAGED = "staged "
"""Prefix to the name of a state tensor: the region to which a prefill writes it."""
STAGED_STATE = "state of prompts being prefilled"
WEIGHTS = "weights of decode", "weights of prefill", "weights of extend"
ACTIVATIONS, BUFFERS = "activations and workspace", "token, length and logit buffers"
GRAPH_BYTES = 8 << 20
"""Assumed bytes per batch size, for its CUDA graph and its execution context."""
STAGED_SHARE = 8
"""One in this many rows can be prefilled at a time (at least one); each needs the memory of another row of caches."""
_INT64, _INT32, _FLOAT32 = 8, 4, 4


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one kind of device memory."""

    kind: str
    bytes: int
    known: str
    """Origin of the figure: `exact`, `modelled`, `assumed`, or reported by the `engine`."""


@dataclass(frozen=True)
class CacheLine:
    """Consecutive layers whose caches have the same shape."""

    first_layer: int
    last_layer: int
    slots: int
    pages: int
    """The number of pages; 0 without page bounds."""
    bytes_per_row: int
    """Bytes of keys, values and bounds of one layer and row."""


@dataclass(frozen=True)
class BufferSizes:
    """The sizes of one run."""

    rows: int
    prefill_rows: int
    """The largest number of prompts of one prefill run."""
    prefill_tokens: int
    """The largest number of padded tokens of one prefill run, over all its prompts."""
    turn_tokens: int = 0
    """The largest number of tokens of a turn; 0 if there are no turns."""


@dataclass(frozen=True)
class DevicePlan:
    """The memory of one engine on one GPU."""

    sizes: BufferSizes
    lines: tuple[MemoryLine, ...]
    caches: tuple[CacheLine, ...]
    row_bytes: int
    """Bytes of one more row: caches, small buffers, CUDA graph."""

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(line.bytes for line in self.lines)

    def of(self, *kinds: str) -> int:
        """Return the bytes of some kinds of memory."""
        return sum(line.bytes for line in self.lines if line.kind in kinds)


@dataclass(frozen=True)
class EngineBytes:
    """Sizes that only an engine knows, in bytes."""

    prefill_weights: int
    decode_weights: int
    activations: int
    """Activations of the largest graph; they never run at the same time and share the memory."""
    known: str
    extend_weights: int = 0
    """0 if there are no turns."""

    @property
    def weights(self) -> tuple[int, int, int]:
        """The bytes of each kind of `WEIGHTS`."""
        return self.decode_weights, self.prefill_weights, self.extend_weights


@dataclass(frozen=True)
class Region:
    """A region of the block that is allocated for an engine's rows."""

    offset: int
    size: int


def plan_memory(vocab_size: int, state: Sequence[StateTensor], engine: EngineBytes, sizes: BufferSizes) -> DevicePlan:
    """Plan everything that is on the GPU while `sizes.rows` rows decode and prompts are prefilled."""
    caches = len({tensor.cache for tensor in state})
    bytes_of: dict[str, int] = {}
    for name, size in regions(vocab_size, caches, state, sizes, engine.activations):
        kind = _kind_of(name)
        bytes_of[kind] = bytes_of.get(kind, 0) + aligned(size)
    lines = (
        *(MemoryLine(kind, size, engine.known) for kind, size in zip(WEIGHTS, engine.weights, strict=True)),
        *(MemoryLine(kind, size, engine.known if kind == ACTIVATIONS else "exact") for kind, size in bytes_of.items()),
        MemoryLine("CUDA graphs", sizes.rows * GRAPH_BYTES, "assumed"),
    )
    row = sum(tensor.bytes_per_row() for tensor in state) + row_buffer_bytes(vocab_size, caches) + GRAPH_BYTES
    return DevicePlan(sizes, tuple(line for line in lines if line.bytes), cache_lines(state), row)


def regions(
    vocab_size: int, caches: int, state: Sequence[StateTensor], sizes: BufferSizes, activations: int
) -> list[tuple[str, int]]:
    """Return name and bytes of every region of the allocated block, in order."""
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
        *([("turn", turn_offsets(sizes.turn_tokens, caches)[-1])] if sizes.turn_tokens else []),
        ("activations", activations),
    ]


def turn_offsets(tokens: int, caches: int) -> list[int]:
    """Return where the inputs of one row's turn are in their region: ids, length, position, cache lengths; its end."""
    return list(accumulate((aligned(_INT64 * count) for count in (tokens, 1, 1, caches)), initial=0))


def sizes_for(prefill: Sequence[Profile], rows: int, turn_tokens: int = 0) -> BufferSizes:
    """Return the most that runs at once: `rows` rows in decode, and as many prompts as profiles and memory allow.

    `turn_tokens` is the longest turn of one row; 0 for none."""
    staged = min(max(1, rows // STAGED_SHARE), max(profile.batch.largest for profile in prefill))
    tokens = max(min(staged, p.batch.largest) * (p.sequence.largest if p.sequence else 1) for p in prefill)
    return BufferSizes(rows, staged, tokens, turn_tokens)


def row_buffer_bytes(vocab_size: int, caches: int) -> int:
    """Return the bytes of one row in the buffers of a run: token, position, cache lengths, logits, best token."""
    return _INT64 * (2 + caches) + _FLOAT32 * vocab_size + _INT32


def cache_lines(state: Iterable[StateTensor]) -> tuple[CacheLine, ...]:
    """Return the caches' shapes; consecutive layers of equal shape are one line."""
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
    """Return slots, pages and bytes per row of one layer."""
    slots = pages = size = 0
    for tensor in tensors:
        size += tensor.bytes_per_row()
        if tensor.name.startswith("k_cache"):
            slots += tensor.shape[1]
        elif tensor.name.startswith("bounds"):
            pages += tensor.shape[2]
    return slots, pages, size


def aligned(size: int) -> int:
    """Round bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(sizes: Iterable[tuple[str, int]]) -> tuple[dict[str, Region], int]:
    """Place regions one after another, each aligned; also return the total bytes."""
    regions: dict[str, Region] = {}
    offset = 0
    for name, size in sizes:
        regions[name] = Region(offset, size)
        offset += aligned(size)
    return regions, offset


def check_fits(plan: DevicePlan, free_bytes: int, what: str = "the engine") -> None:
    """Raise UnsupportedEnvironment, with the shortfall and settings that help, if the plan does not fit."""
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
    """Return the bytes that would be left; negative if some are missing."""
    return free_bytes - plan.total


def remedies(plan: DevicePlan, missing: int) -> list[str]:
    """Return settings that would save `missing` bytes, the mildest first; never empty."""
    found = []
    rows = _rows_that_fit(plan, missing)
    if rows >= 1:
        found.append(f"run at most {_rows(rows)} at once")
    if plan.of(ACTIVATIONS) > missing:
        tokens = int(plan.sizes.prefill_tokens * (1 - missing / plan.of(ACTIVATIONS)))
        if tokens >= TOKENS_PER_PREFILL:  # below that many, shorter prompts are prefilled together
            found.append(f"build with --max-input-len {tokens}")
    weights = plan.of(*WEIGHTS)
    if weights // 2 >= missing:
        found.append(f"build with weights of half the width (now {readable_size(weights)}: each plan has its own)")
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
