"""The loops of a source file, by lines: the place of a loop's head, and the lines that it encloses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_START = re.compile(r"\b(for|while|do)\b")
_PRAGMA = re.compile(r"#\s*pragma unroll\b\s*(\w*)")


@dataclass(frozen=True)
class SourceLoop:
    """One loop. Lines count from 1."""

    file: str
    first: int
    """Line of `for`, `while` or `do`."""
    body: int
    """Line of the body's first statement."""
    last: int
    test: tuple[int, int]
    """First and last line of the head: of the condition tested before each round."""
    unroll: int | None
    """The N of `#pragma unroll N` before the loop; 0 for a pragma without a number, which asks for all rounds."""

    trips: int | None = None
    """Rounds, where they are a constant of the file."""

    def encloses(self, line: int) -> bool:
        return self.first <= line <= self.last

    def in_test(self, line: int) -> bool:
        return self.test[0] <= line <= self.test[1]


@cache
def loops_of(path: Path) -> tuple[SourceLoop, ...]:
    """Return the loops of one file, outer ones first."""
    source = path.read_text(encoding="utf-8")
    text = _without_comments(source)
    found = []
    ended_by_do = set()
    for match in _START.finditer(text):
        if match.start() in ended_by_do:
            continue
        if match.group(1) == "do":
            body_start = _next_solid(text, match.end())
            body_end = _statement_end(text, body_start)
            test_start = _next_solid(text, body_end)
            ended_by_do.add(test_start)
            test = (test_start, _closing(text, text.index("(", test_start)))
            last = test[1]
        else:
            opening = text.find("(", match.end())
            if opening < 0 or text[match.end() : opening].strip():
                continue
            test = (match.start(), _closing(text, opening))
            body_start = _next_solid(text, test[1] + 1)
            last = _statement_end(text, body_start) - 1
        found.append(
            SourceLoop(
                path.name,
                _line(text, match.start()),
                _line(text, _next_solid(text, body_start + 1) if text[body_start] == "{" else body_start),
                _line(text, last),
                (_line(text, test[0]), _line(text, test[1])),
                _unroll(source, _line(text, match.start())),
                _trips(text[test[0] : test[1]], source),
            )
        )
    return tuple(sorted(found, key=lambda loop: (loop.first, -loop.last)))


def _unroll(source: str, line: int) -> int | None:
    """Return the request on the line before: N, 0 for all, None for none. A constant's name counts as its value."""
    before = source.splitlines()[line - 2].strip() if line >= 2 else ""
    match = _PRAGMA.match(before)
    if match is None:
        return None
    return (_constant(match.group(1), source) or 0) if match.group(1) else 0


def _trips(head: str, source: str) -> int | None:
    """Return the rounds of a head like `for (int i = 0; i < kInFlight; ++i)`; None for others."""
    match = re.search(r"= 0; (\w+) < (\w+); (?:\+\+\1|\1\+\+)$", head)
    return _constant(match.group(2), source) if match else None


def _constant(text: str, source: str) -> int | None:
    """Return a number, or the value of the one constant of that name: several classes of a file may have their own."""
    if text.isdigit():
        return int(text)
    values = set(re.findall(rf"\bconstexpr \w+ {text} = ([^;]+);", source))
    value = values.pop() if len(values) == 1 else ""
    return int(value) if value.isdigit() else None


def _without_comments(source: str) -> str:
    """Comments, texts and preprocessor lines as blanks, so that positions stay."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), source)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _next_solid(text: str, position: int) -> int:
    while text[position].isspace():
        position += 1
    return position


def _closing(text: str, opening: int) -> int:
    """Position of the bracket that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"a bracket on line {_line(text, opening)} is never closed")


def _statement_end(text: str, start: int) -> int:
    """Position behind the statement that begins at `start`."""
    if text[start] == "{":
        return _closing(text, start) + 1
    if match := re.compile(r"(for|while|if)\b[^(]*").match(text, start):
        end = _statement_end(text, _next_solid(text, _closing(text, match.end()) + 1))
        after = re.compile(r"\s*else\b\s*").match(text, end)
        return _statement_end(text, after.end()) if after and match.group(1) == "if" else end
    position = start
    while text[position] != ";":
        position = _closing(text, position) + 1 if text[position] in "({[" else position + 1
    return position + 1
