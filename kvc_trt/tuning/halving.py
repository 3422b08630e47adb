"""Successive halving: many candidates on few prompts, and fewer of them on more.

After each round a candidate goes if one that stays takes no more bytes and is better by more than chance explains; or,
where the wanted share stays already, if one that stays takes no more bytes, or the best one is better beyond chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvc_trt.tuning.candidates import Candidate
from kvc_trt.tuning.differences import Qualities

SHARE = 0.5
"""The share of candidates that a round should leave."""
FIRST_PROMPTS = 6
GROWTH = 2


@dataclass(frozen=True)
class Round:
    """The candidates after some prompts, and those that stayed."""

    prompts: int
    stayed: tuple[Candidate, ...]
    """The best first."""
    dropped: Mapping[Candidate, Candidate]
    """For each candidate that goes, the one that is better, or as good in no more bytes."""


def rounds(prompts: int) -> Iterator[int]:
    """Yield the number of prompts that are answered after each round; after the last round it is `prompts`."""
    some = min(FIRST_PROMPTS, prompts)
    while some < prompts:
        yield some
        some = min(prompts, some * GROWTH)
    yield prompts


def narrowed(qualities: Qualities[Candidate]) -> Round:
    """Judge a round: the best one stays, and of the others those that nothing that stays speaks against."""
    ranked = qualities.ranked()
    wanted = max(1, math.ceil(SHARE * len(ranked)))
    stayed, dropped = [ranked[0]], {}
    for candidate in ranked[1:]:
        against = _against(candidate, stayed, qualities, crowded=len(stayed) >= wanted)
        if against is None:
            stayed.append(candidate)
        else:
            dropped[candidate] = against
    return Round(qualities.prompts, tuple(stayed), dropped)


def _against(
    candidate: Candidate, stayed: Sequence[Candidate], qualities: Qualities[Candidate], *, crowded: bool
) -> Candidate | None:
    """The candidate that stays for which this one goes; all that stay have a mean that is no lower."""
    for other in stayed:
        smaller = other.row_bytes <= candidate.row_bytes
        if smaller and (crowded or qualities.worse(candidate, other)):
            return other
    return stayed[0] if qualities.worse(candidate, stayed[0]) and crowded else None
