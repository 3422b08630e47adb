"""The exceptions that reach a user, with the exit code of each, and the one warning.

Every message is one line: what is wrong, where, what was expected against what was found.
`hint` is the next command or another remedy; the CLI prints it on a separate line.

A message may quote a stranger's text (names of files, tensors and policies, whole values), and goes to terminals, logs
and clients. So `KvcError` makes it safe itself: bounded, and without a character that a terminal obeys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

LONGEST_MESSAGE = 2000
"""Characters of a message or a hint; of a longer one the middle is left out."""
_CUT = " [...] "
_CUT_END = 500
"""Characters of its end that a message which is cut keeps: the expected value often stands there."""
_LONGEST_NAME = 200
"""Characters of a name for which a near one is sought."""


class KvcError(Exception):
    """Base of every error that kvc-trt raises on purpose."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = one_line(message)
        self.hint = None if hint is None else one_line(hint)
        super().__init__(self.message)


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
    """A compressed cache from another process does not match its description, or this engine."""


class Cancelled(KvcError):
    """The caller cancelled the request, or closed the scheduler that would have answered it."""


class DeadlineMissed(KvcError):
    """The request's time was over before its answer was whole."""


class RequestFailed(KvcError):
    """A request that passed its checks could not be answered; those beside it are."""

    exit_code = 70


class BarePromptWarning(UserWarning):
    """Text goes to a model with a chat template without it, from Python. Silenced as any warning, by its category."""


def escaped(text: str, keep: str = "") -> str:
    r"""Return a text whose characters can all be seen: others become `\x1b`, `\n` or `\u202e`, unless in `keep`.

    These are control characters, line breaks, marks that turn the direction of writing or take no space, halves of
    characters, and spaces that are not a plain one.
    """
    if text.isprintable():
        return text
    seen = (one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text)
    return "".join(seen)


def one_line(text: str) -> str:
    """Return the text of a message as one line of at most `LONGEST_MESSAGE` characters, all of which can be seen."""
    if len(text) > LONGEST_MESSAGE:  # before and after: a character that is escaped takes up to ten
        text = _cut(text)
    text = escaped(text)
    return text if len(text) <= LONGEST_MESSAGE else _cut(text)


def _cut(text: str) -> str:
    return text[: LONGEST_MESSAGE - _CUT_END - len(_CUT)] + _CUT + text[-_CUT_END:]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or an empty string.

    A stranger's name may have millions of characters; no name that is known is near to it.
    """
    import difflib

    if len(name) > _LONGEST_NAME:
        return ""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def describe(value: object, limit: int = 60) -> str:
    """Return a foreign value as one short line for an error message; no more of it is read than is shown."""
    text = ""
    try:
        for piece in _pieces(value, limit):
            text += piece
            if len(text) > limit:
                return text[: limit - 3] + "..."
    except Exception:  # an integer too long to print, absurd nesting, or a caller's own type
        return f"a {type(value).__name__} that cannot be printed"
    return text


def _pieces(value: object, limit: int) -> Iterator[str]:
    """Yield the text of a value from its beginning on; of long text no more than is certainly too long."""
    if isinstance(value, (str, bytes)):
        yield ascii(value[: limit + 1])
    elif isinstance(value, (list, tuple)):
        yield "[" if isinstance(value, list) else "("
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item, limit)
        yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
    elif isinstance(value, dict):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(item, limit)
        yield "}"
    else:
        yield " ".join(ascii(value).split())  # of NumPy's arrays, several lines
