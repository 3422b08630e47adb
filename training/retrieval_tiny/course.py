"""Which batch comes next: a curriculum while the model learns to match, then a mix of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvc_trt.tasks.task import sample_rng

Shape = TypeVar("Shape")

MIN_STAGE_STEPS = 20
ACCURACY_MEMORY = 0.9


@dataclass(frozen=True)
class Stage(Generic[Shape]):
    """`promote_at` is the running share of right targets at which the next stage begins."""

    shape: Shape
    promote_at: float


class Course(Generic[Shape]):
    """`mix` is pairs of a share and a shape; `stream` names the random numbers that choose among them."""

    def __init__(
        self, stream: str, seed: int, curriculum: Sequence[Stage[Shape]], mix: Sequence[tuple[float, Shape]]
    ) -> None:
        self._stream, self._seed = stream, seed
        self._curriculum, self._mix = curriculum, mix
        self._stage = 0
        self._stage_steps = 0
        self.accuracy = 0.0

    def shape(self, step: int) -> Shape:
        """Shape of the batch of this step."""
        if self._stage < len(self._curriculum):
            return self._curriculum[self._stage].shape
        rng = sample_rng(self._stream, self._seed, step)
        choice = rng.choice(len(self._mix), p=[share for share, _ in self._mix])
        return self._mix[choice][1]

    def observe(self, accuracy: float) -> None:
        """Take the share of right targets of the batch just trained on, and perhaps promote."""
        self._stage_steps += 1
        self.accuracy = ACCURACY_MEMORY * self.accuracy + (1 - ACCURACY_MEMORY) * accuracy
        if self._stage == len(self._curriculum) or self._stage_steps < MIN_STAGE_STEPS:
            return
        if self.accuracy > self._curriculum[self._stage].promote_at:
            self._stage, self._stage_steps, self.accuracy = self._stage + 1, 0, 0.0
