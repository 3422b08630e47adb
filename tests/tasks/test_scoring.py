from __future__ import annotations

import pytest

from kvc_trt.tasks.scoring import last_integer, position_match, string_match_all, string_match_any


@pytest.mark.parametrize(
    ("output", "all_of", "any_of"),
    [
        ("The words are Apple and BREAD.", 1, 1),
        ("pineapples", 0.5, 1),  # containment, as in the original
        ("BREAD", 0.5, 1),
        ("", 0, 0),
        ("app le", 0, 0),
    ],
)
def test_containment_ignores_case(output, all_of, any_of):
    assert string_match_all(output, ("apple", "Bread")) == all_of
    assert string_match_any(output, ("apple", "Bread")) == any_of


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
def test_the_last_integer_counts(output, score):
    assert last_integer(output, ("31415",)) == score


@pytest.mark.parametrize(
    ("output", "score"), [("4 5 6", 1), ("4 6 5", 1 / 3), ("4", 1 / 3), ("", 0), ("4 5 6 7", 1), ("x 5 y", 1 / 3)]
)
def test_predictions_are_compared_by_position(output, score):
    assert position_match(output, ("4", "5", "6")) == score
