"""SparQ against its rule written out in loops, by hand, and against hybrid attention where the two are one."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import dense_attention, page_bounds, sparq_attention
from kvc_trt.reference.methods import hybrid, sparq

State = dict[str, Tensor]


@st.composite
def cases(draw: Any) -> tuple[State, dict[str, Any]]:
    """Quantised caches with unequal rows, and NaN past each row's end."""
    kv_heads, group, size = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3])), draw(st.sampled_from([2, 5]))
    slots = draw(st.integers(1, 30))
    rows = draw(st.lists(st.integers(1, slots), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def quantised(*shape: int) -> Tensor:
        return (torch.randint(0, 5, shape, generator=generator) - 2).double() / 2

    query = quantised(len(rows), kv_heads * group, size)
    keys, values = quantised(2, len(rows), kv_heads, slots, size)
    for b, m in enumerate(rows):
        keys[b, :, m:], values[b, :, m:] = torch.nan, torch.nan
    options = {
        "top_r": draw(st.integers(1, size)),
        "top_k": draw(st.integers(1, 12)),
        "reallocate": draw(st.booleans()),
    }
    if draw(st.booleans()):
        options["token_budget"] = draw(st.integers(1, slots + 3))
    return {"query": query, "keys": keys, "values": values, "lengths": torch.tensor(rows)}, options


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [weight / sum(weights) for weight in weights]


def head_scores(query: Tensor, keys: Tensor, channels: list[int]) -> list[float]:
    """One head's score of every key."""
    part, whole = float(query[channels].abs().sum()), float(query.abs().sum())
    temperature = math.sqrt(len(query) * (part / whole if part else 1))
    return [sum(float(query[d] * key[d]) for d in channels) / temperature for key in keys]


@settings(max_examples=80, deadline=None)
@given(cases())
def test_sparq_attention_equals_its_rule_written_as_loops(case: tuple[State, dict[str, Any]]) -> None:
    state, options = case
    output, selected = sparq_attention(**state, **options)
    top_k, budget = options["top_k"], options.get("token_budget", 0)
    group = state["query"].shape[1] // state["keys"].shape[1]
    assert selected.shape == (*state["keys"].shape[:2], max(top_k + 1, budget))
    for b, m in enumerate(state["lengths"].tolist()):
        for kv in range(state["keys"].shape[1]):
            rows = slice(kv * group, (kv + 1) * group)
            queries, keys, values = state["query"][b, rows], state["keys"][b, kv, :m], state["values"][b, kv, :m]
            importance = queries.abs().sum(dim=0).tolist()
            channels = sorted(range(len(importance)), key=lambda d, a=importance: (-a[d], d))[: options["top_r"]]
            scores = [head_scores(query, keys, channels) for query in queries]
            total = sparq.row_scores(state["query"][b], state["keys"][b, :, :m], top_r=options["top_r"])
            assert total.channels[kv].tolist() == channels
            ranked = total.tokens[kv].tolist()
            assert ranked == pytest.approx([sum(column) for column in zip(*scores, strict=True)], rel=1e-12, abs=1e-12)
            others = sorted(range(m - 1), key=lambda x, f=ranked: (-f[x], x))[:top_k]
            dense = m <= max(budget, top_k + 1)
            tokens = list(range(m)) if dense else sorted([*others, m - 1])
            assert selected[b, kv].tolist() == tokens + [-1] * (selected.shape[2] - len(tokens))
            for query, of_head, found in zip(queries, scores, output[b, rows], strict=True):
                weights = torch.softmax(keys[tokens] @ query / math.sqrt(len(query)), dim=0)
                expected = weights @ values[tokens]
                if options["reallocate"] and not dense:
                    share = sum(softmax(of_head)[x] for x in tokens)
                    expected = share * expected + (1 - share) * values.mean(dim=0)
                torch.testing.assert_close(found, expected)


HAND = {
    "query": torch.tensor([[[2.0, 1], [-3, 1]]]),
    "keys": torch.tensor([[1.0, 0], [0, 2], [3, -1], [-2, 0], [0, 0], [0, 1], [1, 1]])[None, None],
    "values": torch.stack([torch.arange(7.0), torch.ones(7)], dim=1)[None, None],
    "lengths": torch.tensor([7]),
}


def test_channels_scores_and_tokens_match_hand_computed_values() -> None:
    """|q| sums to (5, 2): channel 0. The heads' scores are 2/T and -3/T of it, T = sqrt(2·2/3) and sqrt(2·3/4): their
    sum falls with K[0], so token 3 (-2) comes first, then the lowest of the zeros; the current one is read beside."""
    scores = sparq.row_scores(HAND["query"][0], HAND["keys"][0], top_r=1)
    assert scores.channels.tolist() == [[0]]
    slope = 2 / math.sqrt(4 / 3) - 3 / math.sqrt(3 / 2)
    torch.testing.assert_close(scores.tokens, slope * HAND["keys"][0, :, :, 0])
    assert sparq_attention(**HAND, top_r=1, top_k=2)[1].tolist() == [[[1, 3, 6]]]


def test_the_share_of_the_mean_value_matches_a_hand_computed_one() -> None:
    """Head 0 reads 1 + e^-2a + e^a of 4 more, a = sqrt 3: 3.43%; the values' mean is 3."""
    a, exact = math.sqrt(3), [2.0, -4.0, 3.0]
    share = (1 + math.exp(-2 * a) + math.exp(a)) / (2 * math.exp(a) + 3 + math.exp(3 * a) + math.exp(-2 * a))
    assert share == pytest.approx(0.034290, rel=1e-4)
    attended = sum(w * x for w, x in zip(softmax([x / math.sqrt(2) for x in exact]), (1, 3, 6), strict=True))
    output, _ = sparq_attention(**HAND, top_r=1, top_k=2)
    torch.testing.assert_close(output[0, 0], torch.tensor([share * attended + (1 - share) * 3, 1.0]))
    alone, _ = sparq_attention(**HAND, top_r=1, top_k=2, reallocate=False)
    torch.testing.assert_close(alone[0, 0], torch.tensor([attended, 1.0]))


def random_state(m: int, group: int) -> State:
    generator = torch.Generator().manual_seed(m)
    keys, values = torch.randn(2, 1, 2, m + 9, 16, generator=generator)
    query = torch.randn(1, 2 * group, 16, generator=generator)
    return {"query": query, "keys": keys, "values": values, "lengths": torch.tensor([m])}


def test_one_query_head_scores_as_hybrid_attention_does_with_pages_of_one_token() -> None:
    state = random_state(90, 1)
    bounds = (one[0] for one in page_bounds(state["keys"], state["lengths"], 1))
    ours = sparq.row_scores(state["query"][0], state["keys"][0, :, :90], top_r=5)
    pages = hybrid.row_scores(state["query"][0], 90, *bounds, page_size=1, top_r=5)
    assert torch.equal(ours.channels, pages.channels)
    torch.testing.assert_close(torch.softmax(ours.tokens, dim=-1), pages.tokens)


@pytest.mark.parametrize("limits", [{"token_budget": 90}, {"dense_until": 90}])
def test_a_row_that_fits_is_dense_bit_for_bit(limits: dict[str, int]) -> None:
    state = random_state(90, 4)
    output, selected = sparq_attention(**state, top_r=5, top_k=8, **limits)
    assert torch.equal(output, dense_attention(**state))
    assert selected.tolist() == [[list(range(90))] * 2]
    assert (sparq_attention(**random_state(91, 4), top_r=5, top_k=8, **limits)[1] >= 0).sum(dim=-1).tolist() == [[9, 9]]


def test_the_mean_counts_stored_tokens_only() -> None:
    """A query of zeros ranks all tokens alike and reads them alike: the mean replaces the values not read."""
    state = random_state(90, 4)
    state["query"].zero_()
    state["values"][:, :, 90:] = 1e6
    output, selected = sparq_attention(**state, top_r=5, top_k=8)
    assert selected[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 89]
    read, every = state["values"][0, 0, selected[0, 0].long()].mean(dim=0), state["values"][0, 0, :90].mean(dim=0)
    torch.testing.assert_close(output[0, 0], read / 10 + every * 9 / 10)


def test_nan_ranks_last() -> None:
    state = random_state(90, 4)
    state["query"][0, 0, 3] = torch.nan
    output, selected = sparq_attention(**state, top_r=5, top_k=8)
    assert selected[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 89]
    assert not torch.isnan(output[0, 4:]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_r": 17}, r"top_r is 17; expected in 1..16"),
        ({"top_k": 0}, r"top_k is 0; expected at least 1"),
        ({"lengths": torch.tensor([100])}, r"lengths has shape \[1\] with values \[100\]; expected each in 0..99"),
        ({"query": torch.zeros(1, 3, 16)}, r"query has shape \[1, 3, 16\]: 3 query heads"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**random_state(90, 4), "top_r": 5, "top_k": 8, **change}
    with pytest.raises(ValueError, match=message):
        sparq_attention(**arguments)
