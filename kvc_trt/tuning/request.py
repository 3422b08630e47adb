"""A user's request to `tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from kvc_trt.accuracy.grid import FRAMINGS
from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.profile.accelerators import accelerator
from kvc_trt.runtime.kinds import is_integer
from kvc_trt.tasks.own.fitting import Truncate

ROWS = 8
DIVERGENCE = 0.1
"""Nats per token that a choice may diverge from the whole cache where no answers are known."""


@dataclass(frozen=True)
class TuneRequest:
    """The data and limits to choose by, and the folder of answers and pages."""

    data: str | PathLike[str]
    """A file of one's own questions (docs/data.md)."""
    memory: int
    """Bytes for the caches of all rows."""
    rows: int = ROWS
    """Sequences that are decoded together."""
    directory: str | PathLike[str] = "tuned"
    max_step_ms: float | None = None
    """The longest that a step of all rows may take."""
    gpu: str | None = None
    """Take step times from the floor of this GPU; None measures them here."""
    minutes: float | None = None
    """The number of minutes after which no further answer is begun; None asks every prompt."""
    policies: Sequence[str] | None = None
    """With settings after colons; None takes the default ones with their alternatives."""
    formats: Sequence[str] | None = None
    """Cache formats; None takes the default ones."""
    sets: Sequence[str] | None = None
    """Sets of the file; None takes all."""
    framing: str | None = None
    """plain, or chat: through the model's chat template; None: chat where it has one."""
    truncate: Truncate | None = None
    """The way in which a prompt that is too long for the model is cut; None refuses it."""
    samples: int | None = None
    """Prompts to choose by, drawn from the file; None takes all."""
    max_new_tokens: int | None = None
    """The longest answer; None is each question's own."""
    maximum_loss: float = 0.0
    """Share of right answers that a choice may lose against the whole cache beyond what chance explains."""
    maximum_divergence: float = DIVERGENCE
    """The largest divergence of a choice from the whole cache in nats per token, if no answers are known."""
    seed: int = 0
    """Seed of the order in which prompts are asked."""

    @property
    def row_limit(self) -> int:
        """Bytes for one row."""
        return int(self.memory) // self.rows

    def check(self) -> None:
        """InputError for numbers that cannot be right, and for names that nothing has."""
        for name, least in (("rows", 1), ("memory", 1), ("samples", 1), ("max_new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or value < least):
                raise InputError(f"{name}: expected at least {least}, found {describe(value)}")
        for name in ("minutes", "max_step_ms"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not value > 0):
                raise InputError(f"{name}: expected more than 0, found {describe(value)}")
        if self.framing is not None and self.framing not in FRAMINGS:
            near = did_you_mean(self.framing, FRAMINGS)
            raise InputError(f"unknown framing {self.framing!r}{near}", hint=f"framings: {', '.join(FRAMINGS)}")
        if self.gpu is not None:
            accelerator(self.gpu)
