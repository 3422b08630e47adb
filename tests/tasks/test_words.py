"""Words and prose: never twice, and never like an answer."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np

from kvc_trt.tasks.words import ADJECTIVES, NOUNS, prose, spelled, word_stream


def test_numbers_are_spelled_with_the_last_digit_first():
    assert [spelled(number, 3) for number in (0, 1, 26, 26**3 - 1)] == ["aaa", "baa", "aba", "zzz"]
    assert spelled(5, 4, "01") == "1010"


def test_prose_is_varied_and_never_looks_like_an_answer():
    sentences = list(islice(prose(np.random.default_rng(0)), 2000))
    assert len(set(sentences)) > 1990
    assert all(re.fullmatch(r"[A-Z][A-Za-z ',-]+\.", sentence) for sentence in sentences)
    assert sentences[:50] == list(islice(prose(np.random.default_rng(0)), 50))


def test_no_word_of_the_lists_contains_another():
    words = ADJECTIVES + NOUNS
    assert len(set(words)) == len(words)
    assert not [(one, other) for one in words for other in words if one != other and one in other]


def test_the_stream_of_words_never_ends_or_repeats():
    for seed in range(2):
        words = list(islice(word_stream(np.random.default_rng(seed)), 4_000))
        assert len(set(words)) == len(words)
        assert set(words[: len(ADJECTIVES + NOUNS)]) == set(ADJECTIVES + NOUNS)
        assert all(re.fullmatch("[a-z]{3,9}", word) for word in words)
