"""The pieces of an answer: content, thoughts, calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call, the `index`-th of the answer; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of call `index`: JSON text."""

    index: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallStart | Arguments
