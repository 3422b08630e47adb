from __future__ import annotations

import re
from collections import Counter

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.common_words import INSTRUCTION, generate
from tests.tasks.readers import by_word


def draw(target_tokens, index=0):
    return generate(seed=0, index=index, target_tokens=target_tokens, encode=by_word)


def lists(sample) -> list[list[str]]:
    """Return the words of the example, and of the list that is asked about; entries are numbered from 1."""
    found = []
    for text in sample.context.split(INSTRUCTION)[1:]:
        entries = re.findall(r"(\d+)\. ([a-z]+)", text.split("\n")[0])
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        found.append([word for _, word in entries])
    return found


@pytest.mark.parametrize(
    ("target_tokens", "common", "other", "example"),
    [(1200, 6, 1, {3: 10, 1: 10}), (4095, 6, 1, {3: 10, 1: 10}), (4096, 30, 3, {10: 10, 3: 30})],
)
@pytest.mark.parametrize("index", range(3))
def test_ten_words_are_repeated_and_the_others_less(target_tokens, common, other, example, index):
    sample = draw(target_tokens, index)
    shown, asked = (Counter(words) for words in lists(sample))
    assert Counter(shown.values()) == example
    assert {word for word, count in asked.items() if count == common} == set(sample.answers)
    assert len(sample.answers) == 10
    assert Counter(asked.values()) == {common: 10, other: sample.meta["other_words"]}
    assert not set(shown) & set(asked)
    solved = re.search(r"They are (.*)\.\n", sample.context).group(1).split(", ")
    assert set(solved) == {word for word, count in shown.items() if count == max(example)}


def test_the_order_is_random_and_another_in_every_sample():
    orders = [lists(draw(2000, index))[1] for index in range(2)]
    places = [[words.index(word) for word in dict.fromkeys(words)] for words in orders]
    assert places[0] != places[1]
    for sample, words in zip((draw(2000, 0), draw(2000, 1)), orders, strict=True):
        depths = [place / len(words) for place, word in enumerate(words) if word in sample.answers]
        assert 0.35 < sum(depths) / len(depths) < 0.65


def test_a_target_too_short_for_the_longer_form_is_refused():
    with pytest.raises(InputError, match="common-words: the shortest prompt"):
        generate(seed=0, index=0, target_tokens=4096, encode=lambda text: [0] * len(text))
