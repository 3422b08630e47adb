from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime import Request
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.sampling.banned import Banned, banned_sequences, check_leaves_a_token

VOCABULARY = 4
LIMITS = Limits(VOCABULARY, 8, 8, 16, (16,), 8)
TOKENS = st.integers(0, VOCABULARY - 1)
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6, unique=True)


@given(SEQUENCES, st.lists(TOKENS, min_size=1, max_size=12), st.integers(0, 12))
def test_the_banned_tokens_are_those_of_transformers(sequences, text, read_at_once):
    from transformers import NoBadWordsLogitsProcessor

    processor = NoBadWordsLogitsProcessor([list(sequence) for sequence in sequences])
    masked = processor(torch.tensor([text]), torch.zeros(1, VOCABULARY))[0]
    banned = Banned(sequences)
    banned.read(text[:read_at_once])
    for token in text[read_at_once:]:
        banned.read([token])
    assert set(banned.token_ids()) == set(torch.isneginf(masked).nonzero().flatten().tolist())


@given(st.integers(0, 4), st.integers(0, 8))
def test_ends_are_banned_among_the_first_tokens_as_in_transformers(min_tokens, answered):
    from transformers import MinNewTokensLengthLogitsProcessor

    processor = MinNewTokensLengthLogitsProcessor(3, min_tokens, [1, 2], device="cpu")
    masked = processor(torch.zeros(1, 3 + answered, dtype=torch.long), torch.zeros(1, VOCABULARY))[0]
    banned = Banned(ends={2, 1}, min_tokens=min_tokens)
    for _ in range(answered):
        banned.answered()
    assert banned.token_ids() == torch.isneginf(masked).nonzero().flatten().tolist()
    assert banned.is_active == (min_tokens > 0)
    banned.begin_answer()
    assert banned.token_ids() == ([1, 2] if min_tokens else [])


def test_words_are_tokenised_alone_and_after_a_space(letters):
    limits = Limits(28, 8, 8, 16, (16,), 8)
    letters.pre_tokenizer = None
    found = banned_sequences(Request([1], bad_words=["b"], banned_token_ids=[[3, 4]]), letters, limits, "prompt")
    alone, spaced = letters.encode("b").ids, letters.encode(" b").ids
    assert found == list(dict.fromkeys([(3, 4), tuple(alone), tuple(spaced)]))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"banned_token_ids": [[1], []]}, "prompt: banned sequence 1 is empty"),
        ({"banned_token_ids": [[4]]}, "prompt: banned sequence 0: token 0 is 4, expected an id from 0 to 3"),
        ({"banned_token_ids": [["x"]]}, "expected an integer token id"),
        ({"bad_words": ["a"]}, "bad words need a tokenizer"),
    ],
)
def test_invalid_bans_are_refused_by_name(rules, message):
    with pytest.raises(InputError, match=message):
        banned_sequences(Request([1], **rules), None, LIMITS, "prompt")


def test_an_empty_bad_word_is_refused(letters):
    with pytest.raises(InputError, match="a bad word is empty"):
        banned_sequences(Request([1], bad_words=["a", " "]), letters, LIMITS, "prompt")


def test_some_token_is_left_whatever_the_text_is():
    check_leaves_a_token([(0,), (3, 1)], {2, 7}, LIMITS, "prompt")
    with pytest.raises(InputError, match="prompt: bad words and min_tokens leave none of the model's 4 tokens"):
        check_leaves_a_token([(0,), (3, 1), (3,)], {2, 7}, LIMITS, "prompt")
