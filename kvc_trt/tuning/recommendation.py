"""Choose a candidate: the Pareto front of quality over bytes, the candidates about as good as the best, and the choice.

The choice is the smallest candidate of the front whose mean is within one standard error of the best one's, prompt by
prompt: the one-standard-error rule of Breiman, Friedman, Olshen and Stone (Classification and Regression Trees, 1984,
section 3.4). The smallest of all candidates that do not differ significantly from the best would be a bad choice: with
few prompts, even much worse candidates do not differ significantly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvc_trt.tuning.candidates import Candidate
from kvc_trt.tuning.differences import FEWEST, Qualities

DRAWS = 2_000
"""The number of resamples of the prompts from which the confidence is computed."""
Cost = Callable[[Candidate], float]


@dataclass(frozen=True)
class Recommendation:
    """The chosen candidate, and the evidence for the choice."""

    chosen: Candidate
    """The candidate with the fewest bytes among those of the front within one standard error of the best."""
    best: Candidate
    """The candidate with the best mean; among equal ones, that with the fewest bytes."""
    alike: tuple[Candidate, ...]
    """The candidates that do not differ significantly from the best, itself included, the smallest first."""
    behind: tuple[float, float, float]
    """The best candidate's mean minus the chosen one's, and the ends of the 95 % interval."""
    confidence: float
    """The share of resamples in which no candidate of at most the chosen one's bytes is better than it."""
    lost: tuple[float, float, float] | None
    """The chosen one's loss against the whole cache, and the ends of its 95 % interval; None if that was not asked."""
    good_enough: bool
    """True if the chosen one does not differ significantly from the whole cache, or loses no more than is allowed."""


@dataclass(frozen=True)
class HalfChoice:
    """The choice on one half of the prompts, compared with the best on the other half."""

    chosen: Candidate
    best_of_other: Candidate
    """The candidate with the best mean on the other half."""
    behind: tuple[float, float, float]
    """The mean of `best_of_other` minus that of `chosen` on the other half, and the ends of the 95 % interval."""

    @property
    def holds(self) -> bool:
        """True if the choice does not differ significantly from the best on the other half."""
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
    """Return the mean of `best` minus that of `one`, and the ends of the 95 % interval."""
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
