"""The slices of the vocabulary that a mask takes in at once: they change its time, never what is allowed."""

from __future__ import annotations

import random
import re
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.runtime import Grammar
from kvc_trt.runtime.grammar.compiler import _SLICES, Grammars, _limits, _source, _Tokens
from kvc_trt.runtime.grammar.vocabulary import Vocabulary

END = 0
STEPS = 25
TEXT = st.sampled_from([
    {"type": "string"},
    *({"type": "string", "maxLength": most} for most in (1, 2, 3, 5, 9, 13, 22, 31, 40)),
    {"type": "string", "minLength": 7, "maxLength": 20},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "uri"},
    {"type": "string", "pattern": "^[a-z0-9]{3,9}(-[A-Z]+)?$"},
    {"type": "string", "pattern": "^[^a-f]{2,12}$"},
    {"enum": ["new", "newer", "newest of all"]},
    {"type": ["string", "integer", "null"], "maxLength": 11},
])  # fmt: skip
"""Strings that some slices fit in and others do not."""
SCHEMAS = st.builds(
    lambda texts, required: {
        "type": "object",
        "properties": {f"field_{n}": text for n, text in enumerate(texts)},
        "required": [f"field_{n}" for n in range(required)],
        "additionalProperties": False,
    },
    st.lists(TEXT, min_size=3, max_size=6),
    st.integers(1, 3),
)
GRAMMARS = st.one_of(
    st.builds(Grammar.json_schema, SCHEMAS),
    st.sampled_from([
        Grammar.json_object(),
        Grammar.regex(r"([A-Z][a-z]+ ){2,20}on [0-9]{4}"),
        Grammar.regex("(.|\n){1,17}"),
        Grammar.choice([f"{kind} number {n}" for kind in ("order", "customer") for n in range(30)]),
    ]),
)  # fmt: skip


@cache
def vocabulary() -> Vocabulary:
    """One with tokens of every slice: letters and digits, texts and white space of many lengths, control characters."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    letters = random.Random(0)
    words = ["".join(letters.choices("abcXYZ019", k=1 + n % 35)) for n in range(300)]
    texts = [*words, *(f'{a} {b}-{c}, "{a}": é\n\t  ' for a, b, c in zip(words, words[7:], words[31:], strict=False))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return Vocabulary(Tokenizer(library.to_str().encode(), "the tokenizer"), library.get_vocab_size())


@cache
def grammars() -> Grammars:
    return Grammars(vocabulary()._tokenizer, len(vocabulary().tokens))


@cache
def whole() -> LLTokenizer:
    """Return the same vocabulary in one piece: every token is tried."""
    size = len(vocabulary().tokens)
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary())), n_vocab=size + 1, eos_token=size, slices=[])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(GRAMMARS, st.integers(0, 2**32))
def test_slices_change_no_set_of_allowed_tokens(grammar, seed):
    size, draws = len(vocabulary().tokens), np.random.default_rng(seed)
    matcher = grammars().matcher(grammar, [END], "row")
    judge = LLMatcher(whole(), _source(grammar), log_level=0, limits=_limits())
    for _ in range(STEPS):
        bits = np.unpackbits(np.frombuffer(judge.compute_bitmask(), np.uint8), count=size + 1, bitorder="little")
        expected = bits[:-1].astype(bool)
        expected[END] = bits[-1]
        allowed = matcher.allowed()
        np.testing.assert_array_equal(allowed, expected)
        texts = np.flatnonzero(allowed)
        texts = texts[texts != END]
        if not len(texts):
            return
        token = int(draws.choice(texts))
        matcher.advance(token)
        judge.consume_token(token)


def test_every_slice_has_tokens_of_this_vocabulary():
    """Otherwise the property above says nothing about it."""
    texts = [token.decode(errors="replace") for token in vocabulary().tokens]
    first = [next((n for n, one in enumerate(_SLICES) if re.fullmatch(one, text)), None) for text in texts]
    assert set(first) == {None, *range(len(_SLICES))}
