"""Values quoted in error messages are short and plain, and cost no more than what is shown."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import describe

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        # An apostrophe beyond the part that is shown would change the quotation marks of the whole.
        st.text(max_size=80).map(lambda text: text.replace("'", "")),
        st.binary(max_size=80).map(lambda data: data.replace(b"'", b"")),
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=8).map(lambda text: text.replace("'", "")), below, max_size=4),
    ),
    max_leaves=30,
)


@given(VALUES, st.integers(4, 200))
def test_a_description_is_the_beginning_of_the_text_of_a_value(value: Any, limit: int) -> None:
    text = ascii(value)
    assert describe(value, limit) == (text if len(text) <= limit else text[: limit - 3] + "...")


def test_quotation_marks_are_those_of_the_part_that_is_shown() -> None:
    assert describe(b"\0" * 7 + b"'", 6) == "b'\\..."
    assert describe("it's") == '"it\'s"'


def bomb(levels: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value] * 9
    return value


@pytest.mark.parametrize(
    "value",
    [bomb(7), {"a": bomb(7)}, ["x" * 50_000_000], "x" * 50_000_000, [[]] * 5_000_000, b"x" * 50_000_000],
    ids=["bomb", "bomb in a mapping", "text in a list", "text", "many", "bytes"],
)
def test_describing_a_huge_value_reads_no_more_than_is_shown(value: Any) -> None:
    began = time.process_time()
    assert len(describe(value)) == 60
    assert time.process_time() - began < 2, "a bomb read whole takes minutes"


@pytest.mark.parametrize("value", [10**5000, [10**5000]], ids=["alone", "in a list"])
def test_an_integer_that_python_does_not_print_is_named_by_its_type(value: Any) -> None:
    assert describe(value) == f"a {type(value).__name__} that cannot be printed"


def test_a_value_that_contains_itself_is_described() -> None:
    value: list[Any] = []
    value.append(value)
    assert describe(value) == "[" * 57 + "..."
