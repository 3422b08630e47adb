"""Haystacks: filler, needles between its units, and how many units fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.tasks.haystack import SHORT_SENTENCES, FirstItems, fit_units, insert_needles, repeated
from kvc_trt.tasks.kinds.passkey import BACKGROUND


def test_needles_are_inserted_at_their_depth():
    units = list("abcdefgh")
    assert insert_needles(units, ["1"], [0]) == ["1", *units]
    assert insert_needles(units, ["1"], [1]) == [*units, "1"]
    assert insert_needles(units, ["1", "2", "3"], [0.5, 0.25, 0.5]) == list("ab2cd13efgh")
    assert insert_needles([], ["1", "2"], [0.9, 0.1]) == ["1", "2"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 30))
def test_units_keep_their_order_and_no_needle_is_lost(depths, count):
    units, needles = [f"u{i}" for i in range(count)], [f"n{i}" for i in range(len(depths))]
    lines = insert_needles(units, needles, depths)
    assert [line for line in lines if line in units] == units
    assert sorted(line for line in lines if line in needles) == sorted(needles)


def test_drawn_items_are_remembered():
    numbers = iter(range(5))
    drawn = FirstItems(numbers)
    assert drawn.first(3) == [0, 1, 2]
    assert drawn.first(1) == [0]
    assert drawn.first(0) == []
    assert next(numbers) == 3
    assert drawn.first(9) == [0, 1, 2, 4]
    assert FirstItems(repeated("ab")).first(5) == list("ababa")


@pytest.mark.parametrize("sentence", [*SHORT_SENTENCES, *BACKGROUND])
def test_filler_never_looks_like_an_answer(sentence):
    assert not re.search(r"\d|key|:", sentence)


def by_space(text: str) -> list[int]:
    return [0] * len(text.split())


@given(
    question=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    room=st.integers(100, 400),
    minimum=st.integers(0, 1),
    maximum=st.none() | st.integers(1, 80),
)
def test_the_haystack_is_the_largest_that_fits(question, sizes, room, minimum, maximum):
    def length(units: int) -> int:
        return question + sum(sizes[i % len(sizes)] for i in range(units))

    found = fit_units(
        lambda units: "x " * length(units),
        task="any",
        encode=by_space,
        target_tokens=room + 7,
        max_new_tokens=7,
        minimum=minimum,
        maximum=maximum,
    )
    last = room + 7 if maximum is None else maximum
    assert found == max(n for n in range(minimum, last + 1) if length(n) <= room)


@pytest.mark.parametrize("room", range(1, 34))
def test_a_prompt_that_fills_its_room_exactly_fits(room):
    assert fit_units(lambda n: "x " * n, task="any", encode=by_space, target_tokens=room, max_new_tokens=0) == room


def test_few_prompts_are_encoded_and_none_far_beyond_the_target():
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text.split()))
        return by_space(text)

    found = fit_units(
        lambda n: "a b c d e f g " * n, task="any", encode=encode, target_tokens=100_000, max_new_tokens=0
    )
    assert found == 100_000 // 7
    assert len(lengths) < 22
    assert max(lengths) <= 2 * 100_000 + 7


@pytest.mark.parametrize("tokens", [lambda n: 0, lambda n: 50, lambda n: 50 + n // 1000])
def test_units_without_tokens_end_the_search_all_the_same(tokens):
    found = fit_units(
        lambda n: "x " * tokens(n), task="any", encode=by_space, target_tokens=300, max_new_tokens=10
    )  # fmt: skip
    assert found == 300


def test_the_haystack_fits_even_if_length_is_not_monotone():
    def length(n: int) -> int:
        return 40 * n if n % 3 else 20 * n

    found = fit_units(lambda n: "x " * length(n), task="any", encode=by_space, target_tokens=1000, max_new_tokens=0)
    assert length(found) <= 1000


def test_a_target_below_the_shortest_prompt_is_refused():
    with pytest.raises(InputError, match="any: the shortest prompt has 14 tokens and 5 more") as caught:
        fit_units(lambda n: "x " * (10 + n), task="any", encode=by_space, target_tokens=18, max_new_tokens=5, minimum=4)
    assert caught.value.hint == "use a target of at least 19 tokens"
