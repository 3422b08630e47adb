"""How an output is scored against its references: from 0 to 1, higher is better."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Score = Callable[[str, Sequence[str]], float]


def string_match_all(output: str, answers: Sequence[str]) -> float:
    """The share of references that the output contains, whatever their case: RULER's score of its synthetic tasks."""
    said = output.lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def string_match_any(output: str, answers: Sequence[str]) -> float:
    """1 if the output contains any reference, whatever its case; RULER's score where references are alternatives."""
    said = output.lower()
    return float(any(answer.lower() in said for answer in answers))


def last_integer(output: str, answers: Sequence[str]) -> float:
    """1 if the last integer of the output is the reference: LongEval's score of its lines."""
    found = re.findall(r"\d+", output)
    return float(bool(found) and int(found[-1]) in {int(answer) for answer in answers})


def position_match(output: str, answers: Sequence[str]) -> float:
    """The share of positions whose word is the reference's, for answers that are token ids in order."""
    return sum(said == answer for said, answer in zip(output.split(), answers, strict=False)) / len(answers)
