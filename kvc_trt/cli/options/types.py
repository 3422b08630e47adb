"""Values that options take: numbers and names between commas, a number or a word; and options of several commands."""

from __future__ import annotations

import re
from typing import Any

import click
import cloup

from kvc_trt.backends.run_options import PREFILL_PRECISIONS
from kvc_trt.errors import InputError
from kvc_trt.methods.base.token_budget import PERCENT
from kvc_trt.profile.requests.lengths import Lengths
from kvc_trt.sizes import bandwidth_of, bytes_of


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic only in recent versions of click
    """Positive integers separated by commas."""

    name = "N,N,.."

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        """The numbers; fails for anything that is not one."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip().replace("_", "") for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of positive numbers such as 1024,4096", parameter, context)
        return tuple(int(part) for part in parts)


class Names(click.ParamType):  # type: ignore[type-arg]  # as above
    """Words separated by commas."""

    name = "NAME,NAME,.."

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[str, ...]:
        """The names without spaces around them; fails where one is empty."""
        if isinstance(value, tuple):
            return value
        parts = tuple(part.strip() for part in str(value).split(","))
        if not all(parts):
            self.fail(f"{value!r} is not a list of names", parameter, context)
        return parts


class CountOrByName(click.ParamType):  # type: ignore[type-arg]  # as above
    """One positive integer for all, or some by name."""

    name = "N|NAME=N,.."

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int | dict[str, int]:
        """The number, or the numbers by name."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # converted before
        if value.isdecimal() and int(value) > 0:
            return int(value)
        pairs = [part.strip().partition("=") for part in value.split(",")]
        if not all(name and count.isdecimal() and int(count) > 0 for name, _, count in pairs):
            self.fail(
                f"{value!r} is neither a positive number nor a list such as lines=8,passkey=16", parameter, context
            )
        return {name: int(count) for name, _, count in pairs}


class TokensOrPercent(click.ParamType):  # type: ignore[type-arg]  # as above
    """A number of tokens, or a percentage of a prompt."""

    name = "N|N%"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int | str:
        """The number, or the percentage as it is written; fails for anything else."""
        text = str(value).strip()
        if re.fullmatch(PERCENT, text):
            return text
        try:
            return int(text)
        except ValueError:
            self.fail(f"{value!r} is neither a number of tokens nor a percentage such as 20%", parameter, context)


class TokenLengths(click.ParamType):  # type: ignore[type-arg]  # as above
    """A distribution of lengths in tokens."""

    name = "N|MIN:MAX|normal:MEAN,STD"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """The text of the distribution; fails for anything else."""
        try:
            return Lengths.parse(value).text
        except InputError as error:
            self.fail(error.message, parameter, context)


class Bandwidth(click.ParamType):  # type: ignore[type-arg]  # as above
    """Bytes per second, written as 12.5GB/s, 900 MB/s or 100Gbit/s; units are powers of 1000."""

    name = "N(kB|MB|GB|TB|Mbit|Gbit)/s"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """The bytes per second; fails for anything else."""
        if not isinstance(value, str):
            return float(value)
        found = bandwidth_of(value)
        if found is None:
            self.fail(f"{value!r} is not a bandwidth such as 12.5GB/s or 100Gbit/s", parameter, context)
        return found


class Bytes(click.ParamType):  # type: ignore[type-arg]  # as above
    """Bytes, written as 2GiB, 192 MiB, 1.5GB or a plain number."""

    name = "N(MiB|GiB|MB|GB|..)"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """The bytes; fails for anything else, and for less than one."""
        if not isinstance(value, str):
            return int(value)
        found = bytes_of(value)
        if found is None:
            self.fail(f"{value!r} is not a size such as 2GiB, 192MiB or 1.5GB", parameter, context)
        return found


class NumberOr(click.ParamType):  # type: ignore[type-arg]  # as above
    """A number, or one of a few words."""

    name = "number"

    def __init__(self, number: type[int] | type[float], *words: str) -> None:
        self._number, self._words = number, words

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """The number, or the word; fails for anything else."""
        if value in self._words or not isinstance(value, str):
            return value
        try:
            return self._number(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {' or '.join(self._words)}", parameter, context)


PREFILL_PRECISION = cloup.option(
    "--prefill-precision",
    type=click.Choice(PREFILL_PRECISIONS),
    default="f32",
    show_default=True,
    help="bf16: prefill in bfloat16, faster on a processor that multiplies it; decode stays in float32.",
)


SEALED = cloup.option(
    "--sealed",
    is_flag=True,
    help="Copy the engine's files to memory that nobody can write; takes as much memory as the files.",
)
