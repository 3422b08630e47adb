"""Optimisation profiles: the sizes for which TensorRT chooses kernels, which also limit the memory of one run.

Prefill has one profile per range of prompt lengths, extend one per range of turn lengths, decode one per range of batch
sizes. A turn is always that of one row, so the memory of its attention mask does not grow with the batch. An engine
stores its weights once per layout that its kernels need, and a range of only batch one needs another layout (measured
with NVIDIA's builder: 50% more for every weight), so decode has no such range.

Ranges follow from the build's configuration by these functions alone; running an engine calls them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.operators import PROMPT_BLOCK

if TYPE_CHECKING:
    from onnx import ModelProto

LENGTHS = (2048, 8192, 32768, 131072)
"""Prompt lengths at which a range ends, unless the engine's own longest one comes first."""
BATCHES = (8, 64, 512)
"""Batch sizes at which a range ends, unless the engine's largest one comes first."""
TOKENS_PER_PREFILL = 16384
"""Prompts are prefilled together up to this many padded tokens, or those of one longest prompt: enough to fill a GPU,
and the activations do not grow with the batch."""


TOKENS_PER_TURN = 16384
"""Longest turn of one run: the mask of its attention takes a byte per token and entry of the cache."""


@dataclass(frozen=True)
class SizeRange:
    """Sizes of one dimension that a profile allows, and the one it is optimised for."""

    smallest: int
    fastest: int
    largest: int


@dataclass(frozen=True)
class Profile:
    """One optimisation profile."""

    batch: SizeRange
    sequence: SizeRange | None = None
    """Padded prompt lengths, or tokens of a turn; None for decode."""

    @property
    def largest_tokens(self) -> int:
        """The largest number of tokens of one run."""
        return self.batch.largest * (self.sequence.largest if self.sequence is not None else 1)

    def allows(self, batch: int, sequence: int | None = None) -> bool:
        """Return whether the profile allows a run of these sizes."""
        if not self.batch.smallest <= batch <= self.batch.largest:
            return False
        if self.sequence is None or sequence is None:
            return self.sequence is None and sequence is None
        return self.sequence.smallest <= sequence <= self.sequence.largest


def prefill_profiles(max_input_len: int, max_batch_size: int) -> tuple[Profile, ...]:
    """Return ranges of padded prompt lengths up to the longest; the longer the prompts, the fewer run at once."""
    longest = -(-max_input_len // PROMPT_BLOCK) * PROMPT_BLOCK
    profiles = []
    for before, end in _ranges(LENGTHS, longest):
        rows = min(max_batch_size, max(TOKENS_PER_PREFILL, longest) // end)
        profiles.append(Profile(SizeRange(1, 1, max(1, rows)), SizeRange(before + PROMPT_BLOCK, end, end)))
    return tuple(profiles)


def decode_profiles(max_batch_size: int) -> tuple[Profile, ...]:
    """Return ranges of batch sizes up to the largest."""
    return tuple(Profile(SizeRange(before + 1, end, end)) for before, end in _ranges(BATCHES, max_batch_size))


def extend_profiles(max_input_len: int) -> tuple[Profile, ...]:
    """Return ranges of the tokens of one row's turn up to the longest."""
    ranges = _ranges(LENGTHS, min(max_input_len, TOKENS_PER_TURN))
    return tuple(Profile(SizeRange(1, 1, 1), SizeRange(before + 1, end, end)) for before, end in ranges)


def longest_turn(extend: Sequence[Profile]) -> int:
    """Return the most tokens that one run takes; 0 for an engine without turns."""
    return max((profile.largest_tokens for profile in extend), default=0)


def choose_profile(profiles: Sequence[Profile], batch: int, sequence: int | None = None) -> int:
    """Return the index of the profile for one run; InputError, with the limits that the engine was built for, if none
    fits."""
    for index, profile in enumerate(profiles):
        if profile.allows(batch, sequence):
            return index
    found = f"{batch} rows" if sequence is None else f"{batch} prompts of {sequence} padded tokens"
    raise InputError(
        f"{found}: expected at most {_limit(profiles[-1])}",
        hint="build the engine with a larger --max-batch-size or --max-input-len",
    )


def input_shapes(model: ModelProto, profile: Profile) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return smallest, optimal and largest shape of every input with open dimensions."""
    ranges = {"batch": profile.batch, "sequence": profile.sequence, "block": profile.sequence}
    shapes = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_param for dim in dims):
            sizes = [ranges[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims]
            shapes[value.name] = tuple(_sizes(sizes, end) for end in ("smallest", "fastest", "largest"))
    return shapes


def _sizes(sizes: Sequence[SizeRange | int | None], end: str) -> tuple[int, ...]:
    assert None not in sizes, "a length of prompts or turns in a graph whose profile has none"
    return tuple(getattr(size, end) if isinstance(size, SizeRange) else int(size or 0) for size in sizes)


def _ranges(ends: Sequence[int], last: int) -> list[tuple[int, int]]:
    kept = [*(end for end in ends if end < last), last]
    return list(zip([0, *kept], kept, strict=False))


def _limit(last: Profile) -> str:
    if last.sequence is None:
        return f"{last.batch.largest} rows"
    return f"{last.sequence.largest} padded tokens"
