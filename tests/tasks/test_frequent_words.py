from __future__ import annotations

import re
from collections import Counter

import pytest

from kvc_trt.tasks.kinds.frequent_words import FEWEST_DRAWS, INSTRUCTION, generate, rank_counts
from tests.tasks.readers import by_word


@pytest.mark.parametrize("target_tokens", [400, 1000, 4000])
@pytest.mark.parametrize("index", range(3))
def test_frequencies_follow_the_zeta_law_and_ranks_two_to_four_are_asked_for(target_tokens, index):
    sample = generate(seed=0, index=index, target_tokens=target_tokens, encode=by_word)
    counts = Counter(sample.context.removeprefix(INSTRUCTION).split())
    expected = [count for count in rank_counts(sample.meta["draws"], sample.meta["vocabulary"]).tolist() if count]
    assert sorted(counts.values(), reverse=True) == expected
    (dots, _), *ranked = counts.most_common(5)
    assert dots == "..."
    assert tuple(word for word, _ in ranked[:3]) == sample.answers
    assert ranked[3][1] < ranked[2][1]
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != dots)
    assert sample.meta["vocabulary"] == max(5, target_tokens // 50)


def test_from_the_fewest_draws_on_the_answer_is_unambiguous():
    for draws in range(FEWEST_DRAWS, 3000):
        first, second, third, fourth, fifth = rank_counts(draws, 5)
        assert first > second > third > fourth > fifth
    assert len(set(rank_counts(FEWEST_DRAWS - 1, 5))) < 5


def test_counts_are_those_of_the_formula():
    assert rank_counts(1000, 4).tolist() == [607, 151, 67, 37]  # 1000 / 1.6449 = 607.9, over 1, 4, 9, 16
