"""Scores of answers."""

from __future__ import annotations

import pytest

from kvc_trt.tasks.task import last_integer, position_match, string_match_all


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("The words are Apple and BREAD.", 1),
        ("pineapples", 0.5),  # containment, as in the original
        ("BREAD", 0.5),
        ("", 0),
        ("app le", 0),
    ],
)
def test_containment_ignores_case(output, score):
    assert string_match_all(output, ("apple", "Bread")) == score


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("31415", 1),
        ("line 7 holds 31415.", 1),
        ("31415 is on line 7", 0),
        ("031415", 1),
        ("314150", 0),
        ("none", 0),
        ("", 0),
    ],
)
def test_the_last_integer_of_an_answer_is_scored(output, score):
    assert last_integer(output, ("31415",)) == score


def test_the_last_integer_is_compared_as_a_number():
    assert last_integer("It is 007.", ("7",)) == last_integer("0", ("0",)) == 1
    assert last_integer("7", ("no number",)) == last_integer("9" * 5000, ("7",)) == 0


@pytest.mark.parametrize(
    ("output", "score"), [("4 5 6", 1), ("4 6 5", 1 / 3), ("4", 1 / 3), ("", 0), ("4 5 6 7", 1), ("x 5 y", 1 / 3)]
)
def test_predictions_are_compared_by_position(output, score):
    assert position_match(output, ("4", "5", "6")) == score
