"""The choice: the Pareto front of quality over bytes, what cannot be told apart from the best, the smallest of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvc_trt.tune.candidates import Candidate
from kvc_trt.tune.differences import Qualities

DRAWS = 2_000
"""Resamples of the prompts that the confidence is counted over."""


@dataclass(frozen=True)
class Recommendation:
    """One candidate, and how far it can be trusted."""

    chosen: Candidate
    """The fewest bytes of all that cannot be told apart from the best."""
    best: Candidate
    """The best mean."""
    alike: tuple[Candidate, ...]
    """All that cannot be told apart from the best, itself included, the smallest first."""
    behind: tuple[float, float]
    """The 95 % interval of how much better the best is than the chosen one."""
    confidence: float
    """The share of resamples in which no candidate of at most its bytes has a higher mean than the chosen one."""
    good_enough: bool
    """True if it cannot be told apart from the whole cache, or loses no more than is allowed."""


def front(qualities: Qualities[Candidate]) -> list[Candidate]:
    """The candidates of which none with at most their bytes has a higher mean; the smallest first."""
    ordered = sorted(qualities.by_name, key=lambda one: (one.row_bytes, -qualities.mean(one)))
    found: list[Candidate] = []
    for candidate in ordered:
        if not found or qualities.mean(candidate) > qualities.mean(found[-1]):
            found.append(candidate)
    return found


def recommend(
    qualities: Qualities[Candidate], whole: Sequence[float] | None = None, allowed_loss: float = 0.0
) -> Recommendation:
    """Choose among candidates that were asked the same prompts; `whole` is the whole cache's quality on them.

    Without `whole` nothing says how good is good enough, and every choice is.
    """
    best = qualities.ranked()[0]
    alike = sorted(
        (one for one in qualities.by_name if one == best or not qualities.worse(one, best)),
        key=lambda one: (one.row_bytes, -qualities.mean(one)),
    )
    chosen = alike[0]
    return Recommendation(
        chosen,
        best,
        tuple(alike),
        (0.0, 0.0) if chosen == best else qualities.behind(chosen, best),
        _confidence(qualities, chosen),
        whole is None or _enough(qualities.by_name[chosen], whole, allowed_loss),
    )


def _confidence(qualities: Qualities[Candidate], chosen: Candidate) -> float:
    names = list(qualities.by_name)
    means = qualities.resampled(DRAWS)
    rivals = [place for place, one in enumerate(names) if one.row_bytes <= chosen.row_bytes]
    return float(np.mean(means[:, names.index(chosen)] >= means[:, rivals].max(axis=1) - 1e-12))


def _enough(own: Sequence[float], whole: Sequence[float], allowed_loss: float) -> bool:
    pair = Qualities({"own": own, "whole": whole})
    return not pair.worse("own", "whole") or pair.mean("whole") - pair.mean("own") <= allowed_loss
