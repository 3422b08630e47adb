"""Caps of logits and sinks in the reference: what they leave as it is, and what they must bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvc_trt import reference
from kvc_trt.reference.dense import attention_weights, causal_attention
from kvc_trt.reference.methods.hybrid import row_scores
from kvc_trt.reference.softmax import PLAIN, Softmax

HEADS, GROUPS, SIZE, ENTRIES, PAGE = 6, 2, 16, 60, 4
LENGTHS = torch.tensor([ENTRIES, ENTRIES - 13])


def tables(seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [2,H,8,D], keys and values [2,G,60,D]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, HEADS, 8, SIZE), (2, GROUPS, ENTRIES, SIZE), (2, GROUPS, ENTRIES, SIZE))
    query, keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query * scale, keys, values


def bounds(keys: Tensor) -> tuple[Tensor, Tensor]:
    return reference.page_bounds(keys, LENGTHS, PAGE)


def dense(seed: int, softmax: Softmax) -> list[Tensor]:
    query, keys, values = tables(seed)
    return [reference.dense_attention(query[:, :, 0], keys, values, LENGTHS, softmax=softmax)]


def causal(seed: int, softmax: Softmax) -> list[Tensor]:
    query, keys, values = tables(seed)
    return [causal_attention(query[0], keys[0], values[0], 5, window=window, softmax=softmax) for window in (None, 7)]


def turn(seed: int, softmax: Softmax) -> list[Tensor]:
    query, keys, values = tables(seed)
    new = torch.tensor([8, 5])
    given: dict[str, Any] = {"prompt_budget": 20, "pool_kernel": 3, "softmax": softmax}
    attended = reference.extend_attention(query, keys, values, LENGTHS - new, new, softmax=softmax)
    kept = reference.compact_turn(query, keys, values, LENGTHS, new, **given)
    return [attended, kept.keys, kept.indices]


def votes(seed: int, softmax: Softmax) -> list[Tensor]:
    query, keys, values = tables(seed)
    kept = reference.compact(query, keys, values, LENGTHS, prompt_budget=20, pool_kernel=3, softmax=softmax)
    return [kept.keys, kept.values, kept.indices]


def hybrid(seed: int, softmax: Softmax) -> list[Tensor]:
    query, keys, values = tables(seed)
    pages = LENGTHS, *bounds(keys)
    numbers: dict[str, Any] = {"page_size": PAGE, "top_r": 6, "top_k": 17, "softmax": softmax}
    return list(reference.hybrid_attention(query[:, :, 0], keys, values, *pages, **numbers))


def quest(seed: int, softmax: Softmax) -> list[Tensor]:
    query, keys, values = tables(seed)
    numbers: dict[str, Any] = {"page_size": PAGE, "top_k": 16, "softmax": softmax}
    return list(reference.quest_attention(query[:, :, 0], keys, values, LENGTHS, *bounds(keys), **numbers))


EVERYTHING = (dense, causal, turn, votes, hybrid, quest)
Rule = Callable[[int, Softmax], list[Tensor]]


@pytest.mark.slow
@pytest.mark.parametrize("rule", EVERYTHING)
@given(seed=st.integers(0, 1 << 20))
def test_a_cap_beyond_all_logits_changes_nothing(rule: Rule, seed: int) -> None:
    for capped, plain in zip(rule(seed, Softmax(cap=1e8)), rule(seed, PLAIN), strict=True):
        torch.testing.assert_close(capped, plain)


@pytest.mark.parametrize("rule", EVERYTHING)
def test_a_small_cap_changes_what_everything_gives(rule: Rule) -> None:
    found = zip(rule(1, Softmax(cap=0.5)), rule(1, PLAIN), strict=True)
    assert any(not torch.equal(capped, plain) for capped, plain in found)


@pytest.mark.parametrize("rule", EVERYTHING)
@given(seed=st.integers(0, 1 << 20))
def test_sinks_of_minus_infinity_change_nothing(rule: Rule, seed: int) -> None:
    sinks = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for sunk, plain in zip(rule(seed, Softmax(sinks=sinks)), rule(seed, PLAIN), strict=True):
        torch.testing.assert_close(sunk, plain)


@pytest.mark.parametrize("rule", EVERYTHING)
def test_sinks_change_what_everything_gives(rule: Rule) -> None:
    sinks = torch.linspace(-2, 12, HEADS, dtype=torch.float64)
    found = zip(rule(1, Softmax(sinks=sinks)), rule(1, PLAIN), strict=True)
    assert any(not torch.equal(sunk, plain) for sunk, plain in found)


@given(seed=st.integers(0, 1 << 20), sink=st.floats(-5, 5))
def test_a_sink_takes_its_part_of_the_sum(seed: int, sink: float) -> None:
    """It weighs like a token whose logit is the sink and whose value is zero."""
    query, keys, values = tables(seed)
    sinks = torch.full((HEADS,), sink, dtype=torch.float64)
    weights = attention_weights(query[0, :, 0], keys[0], Softmax(sinks=sinks))
    logits = query[0, :, 0].reshape(GROUPS, -1, SIZE) @ keys[0].transpose(1, 2) / SIZE**0.5
    total = logits.exp().sum(-1, keepdim=True) + sinks.reshape(GROUPS, -1, 1).exp()
    torch.testing.assert_close(weights, logits.exp() / total)
    shrunk = reference.dense_attention(query[:1, :, 0], keys[:1], values[:1], LENGTHS[:1], softmax=Softmax(sinks=sinks))
    plain = reference.dense_attention(query[:1, :, 0], keys[:1], values[:1], LENGTHS[:1])
    torch.testing.assert_close(shrunk, plain * weights.sum(-1).reshape(1, HEADS, 1))


def test_sinks_belong_to_their_heads() -> None:
    """Heads of one group vote together, each with its own sink: a head whose sink takes everything has no vote."""
    query, keys, values = tables(5)
    sinks = torch.tensor([0.0, 1e4, 1e4] * GROUPS, dtype=torch.float64)
    given: dict[str, Any] = {"prompt_budget": 20, "pool_kernel": 3}
    sunk = reference.compact(query, keys, values, LENGTHS, **given, softmax=Softmax(sinks=sinks))
    alone = query.reshape(2, GROUPS, -1, *query.shape[2:])[:, :, 0]
    first = reference.compact(alone, keys, values, LENGTHS, **given)
    assert torch.equal(sunk.indices, first.indices)


@given(seed=st.integers(0, 1 << 20), cap=st.floats(0.1, 10))
def test_a_cap_of_a_bound_is_a_bound_of_capped_logits(seed: int, cap: float) -> None:
    """On all channels the temperature is that of attention, so that a page's estimate bounds its tokens' logits."""
    query, keys, _ = tables(seed)
    single = query[0, :GROUPS, 0]  # one head per KV head: the sign of its channels is that of the sum
    low, high = (table[0] for table in bounds(keys))
    softmax = Softmax(cap=cap)
    logits = (single[:, None] @ keys[0].transpose(1, 2) / SIZE**0.5)[:, 0]
    bound = torch.maximum(single[:, None] * low, single[:, None] * high).sum(-1) / SIZE**0.5
    assert (softmax.capped(logits) <= softmax.capped(bound).repeat_interleave(PAGE, 1) + 1e-12).all()
    assert (softmax.capped(logits).abs() <= cap).all()
    found = row_scores(single, ENTRIES, low, high, page_size=PAGE, top_r=SIZE, softmax=softmax).tokens
    expected = torch.softmax(softmax.capped(bound).repeat_interleave(PAGE, 1), dim=-1)
    torch.testing.assert_close(found, expected)


def test_quest_reads_the_same_pages_under_any_cap() -> None:
    assert torch.equal(quest(3, Softmax(cap=0.2))[1], quest(3, PLAIN)[1])
