"""Candidates beside each other, prompt by prompt: means, paired differences and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvc_trt.accuracy.cell import paired_difference
from kvc_trt.accuracy.faithfulness import bootstrap_interval

Name = TypeVar("Name")
FEWEST = 6
"""The fewest prompts on which candidates are called different: a bootstrap of fewer gives too narrow an interval."""


@dataclass(frozen=True)
class Qualities(Generic[Name]):
    """The quality of each candidate's answers: one number per prompt, the same prompts for all; more is better.

    The number is a share of right answers, an overlap, or a divergence with a minus sign.
    """

    by_name: Mapping[Name, Sequence[float]]

    def __post_init__(self) -> None:
        counts = {len(values) for values in self.by_name.values()}
        if len(counts) != 1 or not min(counts):
            raise ValueError(f"qualities: expected the same prompts for all, at least one, found {sorted(counts)}")

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return len(next(iter(self.by_name.values())))

    def mean(self, name: Name) -> float:
        """The mean over the prompts."""
        return float(np.mean(self.by_name[name]))

    def ranked(self) -> list[Name]:
        """The best mean first; of equal ones, the one that was named first."""
        return sorted(self.by_name, key=lambda name: -self.mean(name))

    def behind(self, name: Name, other: Name) -> tuple[float, float]:
        """The 95 % interval of how much better `other` is, prompt by prompt."""
        pairs = zip(self.by_name[other], self.by_name[name], strict=True)
        return bootstrap_interval([better - own for better, own in pairs])

    def worse(self, name: Name, other: Name) -> bool:
        """True if `other` is better by more than chance explains."""
        return self.prompts >= FEWEST and self.behind(name, other)[0] > 0

    def within_one_error(self, name: Name, other: Name) -> bool:
        """True if `other` is better by no more than one standard error of their paired difference."""
        found = paired_difference(self.by_name[other], self.by_name[name])
        return found.value <= found.standard_error

    def resampled(self, draws: int, seed: int = 0) -> NDArray[np.float64]:
        """The means [draws,candidates] over prompts that are drawn anew, the same ones for all candidates."""
        values = np.asarray(list(self.by_name.values()), np.float64)
        drawn = np.random.default_rng(seed).integers(0, self.prompts, (draws, self.prompts))
        return np.stack([values[:, one].mean(axis=1) for one in drawn])
