"""Several mistakes in one C++ file, each beside the right text; the number in `kvc_mutant` chooses one at run time.

A mistake is a text that occurs once in the file, and its replacement. The guard goes around the smallest whole
expression that differs, or around whole statements where one more or fewer is executed:

    const float scale = (kvc_mutant == 3 ? (whole / whole) : (part / whole));
    { if (kvc_mutant == 4) {} else { __syncthreads(); } }

Guards know tokens and brackets, not the language. A mistake that no guard can make (in a type, a declaration, one of
several arguments of a template, a constant expression) either raises CannotGuard or does not compile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

VARIABLE = "kvc_mutant"
_TOKEN = re.compile(
    r"""(?P<skipped>\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*)
    |"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[A-Za-z_]\w*|\.?\d(?:[eE][-+]|[\w.'])*
    |<<=|>>=|\.\.\.|->|::|&&|\|\||\+\+|--|[-+*/%&|^<>=!]=|.""",
    re.VERBOSE | re.DOTALL,
)
_PARTNERS = {"(": ")", "[": "]", "{": "}"}
_ASSIGNMENTS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="))
_BOUNDS = (frozenset(("&&", "||")), frozenset(("?", ":")), _ASSIGNMENTS)
"""Operators that bind less than any other, the closest first: an expression that has none of a class ends at them."""
_ENDS = frozenset((",", ";", "return", "else", "do"))
_HEADERS = frozenset(("if", "for", "while", "switch", "constexpr"))
_OF_STATEMENTS = frozenset((";", "if", "for", "while", "do", "switch", "return"))


class CannotGuard(Exception):
    """A mistake that is no other expression and no other statements."""


class Mistake(NamedTuple):
    """`right`, which occurs once in a file, replaced by `wrong` where `kvc_mutant` is `number`."""

    number: int
    right: str
    wrong: str


def with_mistake(text: str, right: str, wrong: str) -> str:
    """Return the file with the mistake alone."""
    assert text.count(right) == 1, f"the file has changed: {right!r} occurs there {text.count(right)} times"
    return text.replace(right, wrong)


def guarded(text: str, mistakes: Sequence[Mistake]) -> str:
    """Return the file with every mistake beside the right text."""
    guards = sorted((_guard(text, mistake) for mistake in mistakes), key=lambda one: (one.start, -one.end))
    return _Nested(iter(guards)).rendered(text, 0, len(text))


@dataclass(frozen=True)
class _Guard:
    """Characters of the file that a mistake replaces by `wrong`."""

    start: int
    end: int
    number: int
    wrong: str
    are_statements: bool

    def around(self, right: str) -> str:
        chosen = f"{VARIABLE} == {self.number}"
        if self.are_statements:
            return f"{{ if ({chosen}) {{ {self.wrong} }} else {{ {right} }} }}"
        return f"({chosen} ? ({self.wrong}) : ({right}))"


class _Nested:
    """Guards in the order of their starts, the outer one of two that start together first."""

    def __init__(self, guards: Iterator[_Guard]) -> None:
        self._guards = guards
        self._next = next(guards, None)

    def rendered(self, text: str, start: int, end: int) -> str:
        """text[start:end] with the guards that lie there."""
        pieces = []
        while (guard := self._next) is not None and guard.start < end:
            if guard.end > end:
                raise CannotGuard(f"{guard.wrong!r} is for part of what another mistake changes, and for more")
            self._next = next(self._guards, None)
            pieces += [text[start : guard.start], guard.around(self.rendered(text, guard.start, guard.end))]
            start = guard.end
        return "".join((*pieces, text[start:end]))


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a text as a compiler sees them."""

    text: str

    @cached_property
    def found(self) -> list[re.Match[str]]:
        return [one for one in _TOKEN.finditer(self.text) if one["skipped"] is None]

    @cached_property
    def names(self) -> list[str]:
        return [one[0] for one in self.found]

    @cached_property
    def partners(self) -> dict[int, int]:
        """The place of the other bracket, by the place of each."""
        partners, opened = {}, []
        for place, name in enumerate(self.names):
            if name in _PARTNERS:
                opened.append(place)
            elif name in _PARTNERS.values():
                partners[place] = opened.pop()
                partners[partners[place]] = place
        return partners

    def top(self, first: int, end: int) -> list[str]:
        """Return the tokens of a range, without those inside brackets."""
        names = []
        while first < end:
            names.append(self.names[first])
            first = max(first, self.partners.get(first, first)) + 1
        return names

    def slice(self, first: int, end: int) -> str:
        return self.text[self.found[first].start() : self.found[end - 1].end()] if first < end else ""

    def begins_statement(self, place: int) -> bool:
        if place == 0:
            return True
        before = self.names[place - 1]
        return before in {";", "{", "else", "do"} or self._ends_header(place - 1) or self._ends_block(place - 1)

    def _ends_header(self, place: int) -> bool:
        """True if the statement of an `if` or a loop follows."""
        return self.names[place] == ")" and self.names[self.partners[place] - 1] in _HEADERS

    def _ends_block(self, place: int) -> bool:
        """Rather than an initializer, which an operator follows."""
        return self.names[place] == "}" and (
            place + 1 == len(self.names) or re.match(r"\w|[({}]|\+\+|--", self.names[place + 1]) is not None
        )

    def before(self, place: int) -> int:
        """Return the place before, or that of the bracket which the one there closes."""
        return min(place - 1, self.partners.get(place - 1, place - 1))

    def behind(self, end: int) -> int:
        """Return the end of a range that has one more token, and the tokens in brackets if it opens some."""
        return max(end, self.partners.get(end, end)) + 1


def _guard(text: str, mistake: Mistake) -> _Guard:
    changed = with_mistake(text, mistake.right, mistake.wrong)
    difference = _Difference(_Tokens(text), _Tokens(changed))
    difference.close()
    if not _OF_STATEMENTS & set(difference.top()) and difference.take_expression():
        return difference.guard(mistake.number, are_statements=False)
    difference.take_statements()
    return difference.guard(mistake.number, are_statements=True)


class _Difference:
    """A range of tokens of the file, and its replacement in the changed one; outside, both are the same."""

    def __init__(self, file: _Tokens, changed: _Tokens) -> None:
        self._file, self._changed = file, changed
        a, b = file.names, changed.names
        shared = min(len(a), len(b))
        self._first = next((i for i in range(shared) if a[i] != b[i]), shared)
        shared -= self._first
        last = next((i for i in range(shared) if a[-1 - i] != b[-1 - i]), shared)
        self._end = len(a) - last
        self._longer = len(b) - len(a)

    def guard(self, number: int, *, are_statements: bool) -> _Guard:
        start = self._file.found[self._first].start()
        end = self._file.found[self._end - 1].end() if self._first < self._end else start
        wrong = self._changed.slice(self._first, self._end + self._longer)
        return _Guard(start, end, number, wrong, are_statements)

    def top(self) -> list[str]:
        """Return the tokens of both ranges outside brackets."""
        return self._file.top(self._first, self._end) + self._changed.top(self._first, self._end + self._longer)

    def close(self) -> None:
        """Grow until every bracket's other one is in the range too."""
        while True:
            first, end = self._first, self._end
            for tokens, longer in ((self._file, 0), (self._changed, self._longer)):
                partners = [tokens.partners[i] for i in range(first, end + longer) if i in tokens.partners]
                self._first = min((self._first, *partners))
                self._end = max((self._end, *(partner + 1 - longer for partner in partners)))
            if (first, end) == (self._first, self._end):
                return

    def take_expression(self) -> bool:
        """Grow to a whole expression; return False if no larger expression exists."""
        while True:
            top = self.top()
            looser = max((i + 1 for i, bounds in enumerate(_BOUNDS) if bounds & set(top)), default=0)
            ends = _ENDS.union(*_BOUNDS[looser:])
            self._grow(ends)
            if "," not in self.top():
                break
            before = self._first - 1  # arguments: an operand is the call
            if before not in self._file.partners or self._file.names[before] == "{":
                return False
            self._first, self._end = before, self._file.partners[before] + 1
        return self._first < self._end and self._first < self._end + self._longer

    def _grow(self, ends: frozenset[str]) -> None:
        names = self._file.names
        while names[self._first - 1] not in ends | _PARTNERS.keys() and not self._file.begins_statement(self._first):
            self._first = self._file.before(self._first)
        while names[self._end] not in ends and names[self._end] not in _PARTNERS.values():
            self._end = self._file.behind(self._end)

    def take_statements(self) -> None:
        """Grow to whole statements."""
        while not self._file.begins_statement(self._first):
            if self._file.names[self._first - 1] in _PARTNERS:
                wrong = self._changed.slice(self._first, self._end + self._longer)
                raise CannotGuard(f"{wrong!r} is only a part of a statement, and more than an expression")
            self._first = self._file.before(self._first)
        while not self._is_whole(self._file, self._end) or not self._is_whole(self._changed, self._end + self._longer):
            self._end = self._file.behind(self._end)

    def _is_whole(self, tokens: _Tokens, end: int) -> bool:
        return end == self._first or tokens.names[end - 1] in {";", "}"}
