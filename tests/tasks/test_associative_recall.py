from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.associative_recall import SECTION_TOKENS, generate, ids_of


def draw(**arguments):
    return generate(**{"seed": 0, "index": 0, "target_tokens": 600} | arguments)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**40),
    target_tokens=st.integers(100, 3000),
    vocabulary=st.integers(32, 50_000),
    asked=st.integers(1, 8),
)
def test_every_asked_key_has_one_value_and_filler_is_neither(seed, target_tokens, vocabulary, asked):
    sample = draw(seed=seed, target_tokens=target_tokens, vocabulary_size=vocabulary, asked=asked)
    context, question = ids_of(sample.context), ids_of(sample.question)
    assert ids_of(sample.prompt) == context + question
    assert len(context) + 2 * len(question) in (target_tokens, target_tokens - 1)
    pairs = sample.meta["pairs"]
    keys, values = context[: 2 * pairs : 2], context[1 : 2 * pairs : 2]
    assert len(set(keys)) == len(set(values)) == pairs >= asked
    first_value, first_filler = 3 * vocabulary // 8, 3 * vocabulary // 4
    assert all(1 <= key < first_value for key in keys)
    assert all(first_value <= value < first_filler for value in values)
    assert all(first_filler <= token < vocabulary for token in context[2 * pairs :])

    offsets = sample.meta["asked_offsets"]
    assert offsets == sorted(set(offsets))
    assert len(offsets) == asked
    assert len(question) == SECTION_TOKENS
    value_of = dict(zip(keys, values, strict=True))
    for offset, token in enumerate(question):
        assert (token in value_of) == (offset in offsets)
        assert offset in offsets or token >= first_filler
    assert [str(value_of[question[offset]]) for offset in offsets] == list(sample.answers)
    assert all(offset % 2 == 0 for offset in offsets)


def test_half_of_the_context_is_pairs_where_the_vocabulary_allows():
    sample = draw(target_tokens=2064)
    assert sample.meta["pairs"] == len(ids_of(sample.context)) // 4 == 500
    assert draw(target_tokens=2064, vocabulary_size=64).meta["pairs"] == 23
    assert draw(pairs=20).meta["pairs"] == 20


def test_queries_crowd_at_the_beginning_by_the_power_law():
    offsets = Counter(draw(index=index, asked=1).meta["asked_offsets"][0] for index in range(2000))
    weights = [slot**-0.99 for slot in range(1, 17)]
    for slot, weight in enumerate(weights):
        expected = 2000 * weight / sum(weights)
        assert abs(offsets[2 * slot] - expected) < 5 * expected**0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_tokens": 90}, "8 pairs need a context of 32 tokens, the target leaves 26"),
        ({"pairs": 200}, "200 pairs need a context of 800 tokens, the target leaves 536"),
        ({"pairs": 5}, "5 pairs, expected 8 .* to 3071"),
        ({"pairs": 30, "vocabulary_size": 64}, "30 pairs, expected 8 .* to 23"),
        ({"asked": 0}, "0 keys are asked, expected 1 to 16"),
        ({"asked": 17}, "17 keys are asked, expected 1 to 16"),
        ({"vocabulary_size": 16}, "a vocabulary of 16 ids has 5 keys, 8 are asked"),
        ({"vocabulary_size": 0}, "a vocabulary of 0 ids, expected 1 to"),
        ({"vocabulary_size": 10**30}, "a vocabulary of 10+ ids, expected 1 to 2147483647"),
    ],
)
def test_impossible_recall_questions_are_refused(arguments, message):
    with pytest.raises(InputError, match=f"associative-recall: {message}"):
        draw(**arguments)


def test_the_largest_vocabulary_takes_no_memory_of_its_size():
    assert max(ids_of(draw(vocabulary_size=2**31 - 1).prompt)) > 2**30
