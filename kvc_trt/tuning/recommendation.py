"""The choice: the Pareto front of quality over bytes, what cannot be told apart from the best, and one of these.

Chosen is the smallest candidate of the front whose mean is within one standard error of the best one's, prompt by
prompt: the one-standard-error rule of Breiman, Friedman, Olshen and Stone (Classification and Regression Trees, 1984,
section 3.4).
Of all that cannot be told apart, the smallest would be the worst that few prompts let pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvc_trt.tuning.candidates import Candidate
from kvc_trt.tuning.differences import FEWEST, Qualities

DRAWS = 2_000
"""Resamples of the prompts that the confidence is counted over."""
Cost = Callable[[Candidate], float]


@dataclass(frozen=True)
class Recommendation:
    """One candidate, and how far it can be trusted."""

    chosen: Candidate
    """The fewest bytes of all on the front within one standard error of the best."""
    best: Candidate
    """The best mean, of equal ones that of the fewest bytes."""
    alike: tuple[Candidate, ...]
    """All that cannot be told apart from the best, itself included, the smallest first."""
    behind: tuple[float, float, float]
    """How much better the best is than the chosen one, and the 95 % interval."""
    confidence: float
    """The share of resamples in which the best candidate of at most its bytes is no better than it."""
    lost: tuple[float, float, float] | None
    """The chosen one's loss against the whole cache, and its 95 % interval; None where that was not asked."""
    good_enough: bool
    """True if it cannot be told apart from the whole cache, or loses no more than is allowed."""


@dataclass(frozen=True)
class HalfChoice:
    """The choice on one half of the prompts, and how well it does on the other."""

    chosen: Candidate
    best_of_other: Candidate
    """The best mean on the other half."""
    behind: tuple[float, float, float]
    """How much better that one is there, and the 95 % interval."""

    @property
    def holds(self) -> bool:
        """True if the choice cannot be told apart from the best on the prompts that it was not chosen on."""
        return self.behind[1] <= 0


def front(qualities: Qualities[Candidate], cost: Cost = lambda one: one.row_bytes) -> list[Candidate]:
    """The candidates of which none that costs at most as much has a higher mean; the cheapest first."""
    ordered = sorted(qualities.by_name, key=lambda one: (cost(one), -qualities.mean(one)))
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
    on_front = front(qualities)
    best = on_front[-1]
    alike = sorted(
        (one for one in qualities.by_name if one == best or not qualities.worse(one, best)),
        key=lambda one: (one.row_bytes, -qualities.mean(one)),
    )
    chosen = next(one for one in on_front if one == best or (one in alike and qualities.within_one_error(one, best)))
    lost = None if whole is None else _lost(qualities.by_name[chosen], whole)
    return Recommendation(
        chosen,
        best,
        tuple(alike),
        _behind(qualities, chosen, best),
        _confidence(qualities, chosen),
        lost,
        lost is None or lost[0] <= allowed_loss or (qualities.prompts >= FEWEST and lost[1] <= 0),
    )


def on_halves(qualities: Qualities[Candidate]) -> tuple[HalfChoice, HalfChoice] | None:
    """Choose on every second prompt and look at the others, both ways; None where there are too few prompts."""
    if qualities.prompts < 2 * FEWEST:
        return None
    halves = [Qualities({one: values[first::2] for one, values in qualities.by_name.items()}) for first in (0, 1)]
    return _carried(*halves), _carried(*reversed(halves))


def _carried(own: Qualities[Candidate], other: Qualities[Candidate]) -> HalfChoice:
    chosen, best = recommend(own).chosen, other.ranked()[0]
    return HalfChoice(chosen, best, _behind(other, chosen, best))


def _behind(qualities: Qualities[Candidate], one: Candidate, best: Candidate) -> tuple[float, float, float]:
    """How much better the best is, and the 95 % interval."""
    if one == best:
        return 0.0, 0.0, 0.0
    return qualities.mean(best) - qualities.mean(one), *qualities.behind(one, best)


def _confidence(qualities: Qualities[Candidate], chosen: Candidate) -> float:
    names = list(qualities.by_name)
    means = qualities.resampled(DRAWS)
    rivals = [place for place, one in enumerate(names) if one.row_bytes <= chosen.row_bytes]
    return float(np.mean(means[:, names.index(chosen)] >= means[:, rivals].max(axis=1) - 1e-12))


def _lost(own: Sequence[float], whole: Sequence[float]) -> tuple[float, float, float]:
    pair = Qualities({"own": own, "whole": whole})
    return pair.mean("whole") - pair.mean("own"), *pair.behind("own", "whole")
