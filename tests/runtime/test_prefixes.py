"""The table of stored prefixes, and sessions whose prompts start from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvc_trt.errors import InputError
from kvc_trt.runtime.context import NO_TOKENS, Context, extended_digest
from kvc_trt.runtime.session.prefixes import PrefixTable
from tests.runtime.fake_executor import FakePacking

BYTES = 64
"""Bytes of a context's logits and tensors."""


def context_of(tokens, nbytes=BYTES):
    logits = np.zeros(4, np.float32)
    return Context(
        fingerprint=FakePacking.fingerprint,
        logical_length=len(tokens),
        cache_lengths=(len(tokens),),
        token_digest=extended_digest(NO_TOKENS, tokens),
        logits=logits,
        tensors={"k.0": np.zeros(nbytes - logits.nbytes, np.uint8)},
    )


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


class AgainstAList(RuleBasedStateMachine):
    """The table gives the results of a list that is searched from its end."""

    def __init__(self):
        super().__init__()
        self.table = PrefixTable(5 * BYTES)
        self.kept = []
        """Texts with their sizes, the last used at the end."""

    @rule(tokens=TEXTS, units=st.integers(1, 3))
    def add(self, tokens, units):
        self.table.add(context_of(tokens, units * BYTES))
        self.kept = [entry for entry in self.kept if entry[0] != tokens]
        while sum(size for _, size in self.kept) + units > 5:
            self.kept.pop(0)
        self.kept.append((tokens, units))

    @rule(tokens=st.lists(st.integers(0, 1), max_size=6))
    def look(self, tokens):
        found = self.table.longest(tokens)
        fitting = [entry for entry in self.kept if tokens[: len(entry[0])] == entry[0]]
        expected = max(fitting, key=lambda entry: len(entry[0]), default=None)
        if expected is None:
            assert found is None
        else:
            assert found.token_digest == extended_digest(NO_TOKENS, expected[0])
            self.kept.remove(expected)
            self.kept.append(expected)

    @invariant()
    def holds_as_much(self):
        assert len(self.table) == len(self.kept)
        assert self.table.nbytes == BYTES * sum(size for _, size in self.kept) <= self.table.max_bytes


TestAgainstAList = AgainstAList.TestCase


def test_contexts_larger_than_the_table_are_refused_and_evict_nothing():
    table = PrefixTable(2 * BYTES)
    table.add(context_of([1]))
    with pytest.raises(InputError, match="a context of 192 B does not fit in 128 B"):
        table.add(context_of([2], 3 * BYTES))
    assert table.longest([1, 2]) is not None


def test_a_table_of_zero_bytes_refuses_every_context():
    with pytest.raises(InputError, match="does not fit in 0 B"):
        PrefixTable(0).add(context_of([1]))
    with pytest.raises(ValueError, match="at least 0"):
        PrefixTable(-1)


@given(st.lists(TEXTS, max_size=5), st.lists(st.integers(0, 1), max_size=6))
def test_a_cleared_table_is_empty(texts, tokens):
    table = PrefixTable(10 * BYTES)
    for text in texts:
        table.add(context_of(text))
    table.clear()
    assert (len(table), table.nbytes, table.longest(tokens)) == (0, 0, None)
