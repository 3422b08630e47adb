"""Messages between the caller's process and its ranks, pickled, over a socket that only they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError, KvcError, UnsupportedEnvironment

if TYPE_CHECKING:
    from kvc_trt.files.held import LentFile
    from kvc_trt.models.config import ModelConfig

OPEN = "open"
"""The method that makes an executor; every other one is an executor's, but for the next two."""
BEGIN_PREFILL, NEXT_PIECE = "begin_prefill", "next_piece"
"""The methods of a prefill that waits between its pieces: all ranks run the same one, and wait for the next call."""


@dataclass(frozen=True)
class Start:
    """The first message to a rank."""

    rank: int
    ranks: int
    model: ModelConfig
    weights: LentFile
    """The weight file, which the caller holds."""
    device: str
    """cpu or cuda."""
    store: str
    """Path of the file through which the ranks meet."""
    timeout: float
    """Seconds that a rank waits for the others in one sum."""
    threads: int


@dataclass(frozen=True)
class RankCall:
    """One method of one executor, run by all ranks at the same time."""

    executor: int
    method: str
    arguments: tuple[Any, ...]
    result: bool
    """True if this rank's result is wanted."""
    released: tuple[int, ...] = ()
    """Executors and prefills that the caller has dropped since the last call."""


@dataclass(frozen=True)
class Done:
    """A call that ended; `log` are the lines that the rank logged meanwhile, as (level, logger, message)."""

    result: Any
    log: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Failed:
    """A call that raised, in one line."""

    message: str
    hint: str | None
    exit_code: int | None
    """The exit code of a `KvcError`; None for any other exception."""
    intact: bool
    """True if the rank had not yet begun to exchange anything in this call, so that the next one can follow."""
    traceback: str = ""

    def error(self) -> KvcError | None:
        """Return the error as it was raised; None if it is a bug."""
        kinds = {InputError.exit_code: InputError, UnsupportedEnvironment.exit_code: UnsupportedEnvironment}
        kind = None if self.exit_code is None else kinds.get(self.exit_code, KvcError)
        return None if kind is None else kind(self.message, hint=self.hint)
