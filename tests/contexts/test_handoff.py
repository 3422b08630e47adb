"""A context as bytes in memory: whole, or refused before anything is made of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.contexts.handoff import Handoff, check_handoff, largest_handoff, read_handoff, write_handoff
from kvc_trt.errors import HandoffRefused
from kvc_trt.runtime.context import NO_TOKENS, extended_digest
from tests.contexts.conftest import packing_without_graphs, random_context
from tests.every_policy import BY_ROW

POLICIES = ("full", "rocketkv", "h2o", "tova", "sparq", "streaming-llm", "quest", *BY_ROW)
PACKING = packing_without_graphs("rocketkv")


def handed(packing, length, seed=0):
    """Return a context of random tensors, the tokens of its text, and its bytes in a piece of memory that is larger."""
    tokens = list(range(length))
    context = replace(random_context(packing, length, seed=seed), token_digest=extended_digest(NO_TOKENS, tokens))
    content = np.full(largest_handoff(packing) + 64, 0xAB, np.uint8)
    return context, tokens, write_handoff(context, packing, content), content


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15)
@given(length=st.integers(1, 32), seed=st.integers(0, 5))
def test_handoffs_read_back_bit_for_bit(policy, length, seed):
    packing = packing_without_graphs(policy)
    context, tokens, handoff, content = handed(packing, length, seed)
    check_handoff(Handoff(**handoff.model_dump()), packing, tokens)
    found = read_handoff(handoff, packing, content)
    assert handoff.nbytes == context.nbytes <= largest_handoff(packing)
    assert found.tensors.keys() == context.tensors.keys()
    assert all(found.tensors[name].tobytes() == context.tensors[name].tobytes() for name in context.tensors)
    assert found.logits.tobytes() == context.logits.tobytes()
    assert (found.cache_lengths, found.logical_length) == (context.cache_lengths, context.logical_length)
    content[:] = 0
    assert found.logits.tobytes() == context.logits.tobytes(), "it is a copy"


@settings(max_examples=30)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_changed_on_its_way_is_noticed(place, bit):
    _, _, handoff, content = handed(PACKING, 20)
    content[int(place * handoff.nbytes)] ^= 1 << bit
    with pytest.raises(HandoffRefused, match="another checksum"):
        read_handoff(handoff, PACKING, content)


def test_the_logits_of_the_last_token_come_first():
    context, _, _, content = handed(PACKING, 20)
    assert content[: context.logits.nbytes].tobytes() == context.logits.tobytes()


OTHER = "0" * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": OTHER}, "is of model"),
        ({"parameters": OTHER}, "was made under policy"),
        ({"weights": OTHER}, "other weights"),
        ({"state": OTHER}, "other state tensors"),
        ({"compatibility": OTHER}, "compatibility digest"),
        ({"logical_length": 19}, "cache 0 has 20 tokens"),
        ({"logical_length": 1 << 20}, "expected at most"),
        ({"cache_lengths": [20]}, "lengths of 1 caches"),
        ({"cache_lengths": [1 << 20] * len(PACKING.limits.capacities)}, "expected at most"),
        ({"tokens": OTHER}, "another text"),
    ],
)
def test_handoffs_that_do_not_fit_are_refused_before_reading(change, said):
    _, tokens, handoff, _ = handed(PACKING, 20)
    wrong = handoff.model_copy(update={"context": handoff.context.model_copy(update=change)})
    with pytest.raises(HandoffRefused, match=said):
        check_handoff(wrong, PACKING, tokens)


def test_another_prompt_or_size_is_refused():
    _, tokens, handoff, _ = handed(PACKING, 20)
    with pytest.raises(HandoffRefused, match="the prompt has 21"):
        check_handoff(handoff, PACKING, [*tokens, 3])
    with pytest.raises(HandoffRefused, match="another text"):
        check_handoff(handoff, PACKING, [*tokens[:-1], 3])
    with pytest.raises(HandoffRefused, match=f"expected {handoff.nbytes}"):
        check_handoff(handoff.model_copy(update={"nbytes": handoff.nbytes + 4}), PACKING, tokens)
