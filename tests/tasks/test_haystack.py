"""Haystacks: filler, prose and words, and needles between their units."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.tasks.haystack import SHORT_SENTENCES, Drawn, insert_needles, repeated
from kvc_trt.tasks.passkey import BACKGROUND
from kvc_trt.tasks.prose import prose
from kvc_trt.tasks.word_stream import ADJECTIVES, NOUNS, word_stream


def test_needles_stand_behind_their_share_of_the_units():
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


def test_items_are_drawn_once():
    numbers = iter(range(5))
    drawn = Drawn(numbers)
    assert drawn.first(3) == [0, 1, 2]
    assert drawn.first(1) == [0]
    assert drawn.first(0) == []
    assert next(numbers) == 3
    assert drawn.first(9) == [0, 1, 2, 4]
    assert Drawn(repeated("ab")).first(5) == list("ababa")


def test_prose_is_varied_and_never_looks_like_an_answer():
    sentences = list(islice(prose(np.random.default_rng(0)), 2000))
    assert len(set(sentences)) > 1990
    assert all(re.fullmatch(r"[A-Z][A-Za-z ',-]+\.", sentence) for sentence in sentences)
    assert sentences[:50] == list(islice(prose(np.random.default_rng(0)), 50))


@pytest.mark.parametrize("sentence", [*SHORT_SENTENCES, *BACKGROUND])
def test_filler_never_looks_like_an_answer(sentence):
    assert not re.search(r"\d|key|:", sentence)


def test_no_word_of_the_lists_contains_another():
    words = ADJECTIVES + NOUNS
    assert len(set(words)) == len(words)
    assert not [(one, other) for one in words for other in words if one != other and one in other]


def test_words_go_on_and_never_come_twice():
    for seed in range(2):
        words = list(islice(word_stream(np.random.default_rng(seed)), 4_000))
        assert len(set(words)) == len(words)
        assert set(words[: len(ADJECTIVES + NOUNS)]) == set(ADJECTIVES + NOUNS)
        assert all(re.fullmatch("[a-z]{3,9}", word) for word in words)
