"""The exceptions that reach a user, with the exit code of each, and the one warning.

Every message is one line: what is wrong, where, what was expected against what was found.
`hint` is the next command or another remedy; the CLI prints it on a separate line.
"""

from __future__ import annotations

from collections.abc import Iterable


class KvcError(Exception):
    """Base of every error that kvc-trt raises on purpose."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class VerificationFailed(KvcError):
    """The engine ran, and its answers are outside the recorded thresholds."""

    exit_code = 1


class InputError(KvcError):
    """Wrong usage, or an input (file, field, prompt) that cannot be right."""

    exit_code = 2


class UnsupportedEnvironment(KvcError):
    """The request is valid, but this machine cannot carry it out."""

    exit_code = 3


class Busy(UnsupportedEnvironment):
    """There is no room for the request now; the same request can succeed later."""


class HandoffRefused(UnsupportedEnvironment):
    """A compressed cache that came from another process is not what was announced, or not for this engine."""


class Cancelled(KvcError):
    """The caller ended the request, or closed what would have answered it."""


class DeadlineMissed(KvcError):
    """The request's time was over before its answer was whole."""


class RequestFailed(KvcError):
    """A request that passed its checks could not be answered; those beside it are."""

    exit_code = 70


class BarePromptWarning(UserWarning):
    """Text goes to a model with a chat template without it, from Python. Silenced as any warning, by its category."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or an empty string."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def describe(value: object, limit: int = 60) -> str:
    """Return a foreign value as one short line for an error message."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer too long to print, or absurd nesting
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else text[: limit - 3] + "..."
