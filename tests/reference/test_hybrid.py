"""Stage 2 against the rule written out in loops, its limits, and its page walk."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import dense_attention, hybrid_attention, page_bounds
from kvc_trt.reference.methods import hybrid

State = dict[str, Tensor]


@st.composite
def cases(draw: Any) -> tuple[State, dict[str, Any]]:
    """Quantised caches with unequal rows, NaN past each row's end, zero channels and heads of opposite sign."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    group, size, slots = draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([2, 5, 8])), draw(st.integers(1, 24))
    rows = draw(st.lists(st.integers(1, slots), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    levels = draw(st.sampled_from([2, 3, 9]))

    def quantised(*shape: int) -> Tensor:
        return (torch.randint(0, levels, shape, generator=generator) - levels // 2).double() / 2

    query = quantised(batch, kv_heads * group, size)
    if draw(st.booleans()):
        query[:, :, draw(st.integers(0, size - 1))] = 0
    if group > 1 and draw(st.booleans()):
        query[:, 1] = -query[:, 0]
    if draw(st.integers(0, 9)) == 0:
        query.zero_()
    keys, values = quantised(batch, kv_heads, slots, size), quantised(batch, kv_heads, slots, size)
    for b, m in enumerate(rows):
        keys[b, :, m:], values[b, :, m:] = torch.nan, torch.nan
    page_size = draw(st.sampled_from([1, 2, 3, 4, 5, 7]))
    options = {"page_size": page_size, "top_r": draw(st.integers(1, size)), "top_k": draw(st.integers(1, slots + 3))}
    if draw(st.booleans()):
        options["token_budget"] = draw(st.integers(1, slots + 3))
    lengths = torch.tensor(rows)
    page_min, page_max = page_bounds(keys, lengths, page_size)
    state = {
        "query": query,
        "keys": keys,
        "values": values,
        "lengths": lengths,
        "page_min": page_min,
        "page_max": page_max,
    }
    return state, options


def page_scores(query: Tensor, keys: Tensor, page_size: int, channels: list[int]) -> list[float]:
    """Steps 4 to 7 for one KV head, in loops: query [g,D], keys [m,D] -> f of every token."""
    summed = query.sum(dim=0)
    result = [0.0] * len(keys)
    for head in query:
        total, chosen = float(head.abs().sum()), float(head[channels].abs().sum())
        temperature = math.sqrt(len(head) * chosen / total) if total and chosen else math.sqrt(len(head))
        logits = []
        for x in range(len(keys)):
            page = keys[x // page_size * page_size :][:page_size]
            bound = [page[:, d].max() if summed[d] > 0 else page[:, d].min() for d in channels]
            logits.append(sum(float(head[d] * b) for d, b in zip(channels, bound, strict=True)) / temperature)
        weights = [math.exp(e - max(logits)) for e in logits]
        result = [f + w / sum(weights) / len(query) for f, w in zip(result, weights, strict=True)]
    return result


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(query @ keys.T / math.sqrt(query.shape[1]), dim=1) @ values


@settings(max_examples=200, deadline=None)
@given(cases())
def test_hybrid_attention_equals_its_rule_written_as_loops(case: tuple[State, dict[str, Any]]) -> None:
    state, options = case
    before = {name: tensor.clone() for name, tensor in state.items()}
    output, selected = hybrid_attention(**state, **options)
    budget, top_k, p = options.get("token_budget", 0), options["top_k"], options["page_size"]
    kv_heads = state["keys"].shape[1]
    group = state["query"].shape[1] // kv_heads
    assert selected.shape == (len(output), kv_heads, max(top_k, budget))
    for b, m in enumerate(state["lengths"].tolist()):
        bounds = state["page_min"][b], state["page_max"][b]
        scores = hybrid.row_scores(state["query"][b], m, *bounds, page_size=p, top_r=options["top_r"])
        for kv in range(kv_heads):
            heads = slice(kv * group, (kv + 1) * group)
            query, keys, values = state["query"][b, heads], state["keys"][b, kv, :m], state["values"][b, kv, :m]
            importance = query.abs().sum(dim=0).tolist()
            channels = sorted(range(len(importance)), key=lambda d, a=importance: (-a[d], d))[: options["top_r"]]
            assert scores.channels[kv].tolist() == channels
            found = scores.tokens[kv].tolist()
            assert found == pytest.approx(page_scores(query, keys, p, channels), rel=1e-12)
            count = m if m <= budget else min(top_k, m)
            index = sorted(sorted(range(m), key=lambda x, f=found: (-f[x], x))[:count])
            assert selected[b, kv].tolist() == index + [-1] * (selected.shape[2] - count)
            torch.testing.assert_close(output[b, heads], attend(query, keys[index], values[index]))
    for name, tensor in state.items():
        assert torch.equal(tensor.nan_to_num(7), before[name].nan_to_num(7))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_walking_pages_selects_the_same_tokens(case: tuple[State, dict[str, Any]]) -> None:
    """Executors walk pages by (score, page) and cut the last one at its lowest tokens."""
    state, options = case
    options.pop("token_budget", None)
    _, selected = hybrid_attention(**state, **options)
    p, top_k = options["page_size"], options["top_k"]
    for b, m in enumerate(state["lengths"].tolist()):
        bounds = state["page_min"][b], state["page_max"][b]
        tokens = hybrid.row_scores(state["query"][b], m, *bounds, page_size=p, top_r=options["top_r"]).tokens
        for kv, f in enumerate(tokens[:, ::p].tolist()):
            walk = [
                x for j in sorted(range(len(f)), key=lambda j, f=f: (-f[j], j)) for x in range(j * p, min(j * p + p, m))
            ]
            chosen = sorted(walk[:top_k])
            assert selected[b, kv, : len(chosen)].tolist() == chosen


def random_state(m: int, page_size: int, group: int = 4, size: int = 16, slots: int = 0) -> State:
    generator = torch.Generator().manual_seed(m)
    keys, values = torch.randn(2, 1, 2, max(slots, m), size, generator=generator)
    lengths = torch.tensor([m])
    page_min, page_max = page_bounds(keys, lengths, page_size)
    query = torch.randn(1, 2 * group, size, generator=generator)
    return {
        "query": query,
        "keys": keys,
        "values": values,
        "lengths": lengths,
        "page_min": page_min,
        "page_max": page_max,
    }


def dense_of(state: State) -> Tensor:
    return dense_attention(state["query"], state["keys"], state["values"], state["lengths"])


@pytest.mark.parametrize(
    "extra", [{"token_budget": 90, "top_k": 8}, {"token_budget": 16, "dense_until": 90, "top_k": 8}]
)
def test_a_row_that_fits_is_dense_bit_for_bit(extra: dict[str, int]) -> None:
    state = random_state(90, 4, slots=100)
    output, selected = hybrid_attention(**state, page_size=4, top_r=5, **extra)
    assert torch.equal(output, dense_of(state))
    assert selected.tolist() == [[list(range(90))] * 2]
    longer = random_state(91, 4, slots=100)
    _, selected = hybrid_attention(**longer, page_size=4, top_r=5, **extra)
    assert (selected >= 0).sum(dim=-1).tolist() == [[8, 8]]
    assert selected.shape[2] == 90


def test_without_a_budget_half_of_it_still_covers_a_short_row() -> None:
    state = random_state(90, 4)
    output, selected = hybrid_attention(**state, page_size=4, top_r=5, top_k=90)
    assert torch.equal(output, dense_of(state))
    assert selected.shape == (1, 2, 90)


def test_all_channels_and_one_head_rank_pages_like_quest() -> None:
    state = random_state(90, 4, group=1)
    p_min, p_max, q = state["page_min"][0], state["page_max"][0], state["query"][0]
    quest = torch.maximum(q[:, None] * p_min, q[:, None] * p_max).sum(dim=-1)
    found = hybrid.row_scores(q, 90, p_min, p_max, page_size=4, top_r=16).tokens[:, ::4]
    assert torch.equal(found.argsort(dim=-1), quest.argsort(dim=-1))


def test_pages_of_one_token_and_one_head_rank_like_sparq() -> None:
    state = random_state(90, 1, group=1)
    q, keys = state["query"][0], state["keys"][0]
    channels = q.abs().topk(5).indices
    approximate = (q.gather(1, channels)[:, None] * keys.gather(2, channels[:, None].expand(-1, 90, -1))).sum(dim=-1)
    found = hybrid.row_scores(q, 90, state["page_min"][0], state["page_max"][0], page_size=1, top_r=5).tokens
    assert torch.equal(found.argsort(dim=-1), approximate.argsort(dim=-1))


def test_whole_pages_and_a_shorter_last_page() -> None:
    state = random_state(90, 4)
    state["keys"][:, 0, 88:] = state["query"][:, :4].mean(dim=1, keepdim=True) * 100  # the partial page wins in head 0
    state["page_min"], state["page_max"] = page_bounds(state["keys"], state["lengths"], 4)
    output, selected = hybrid_attention(**state, page_size=4, top_r=16, top_k=10, select="pages")
    counts = (selected >= 0).sum(dim=-1)[0].tolist()
    assert counts == [6, 8]
    for kv in range(2):
        index, heads = selected[0, kv, : counts[kv]].long(), slice(kv * 4, kv * 4 + 4)
        expected = attend(state["query"][0, heads], state["keys"][0, kv, index], state["values"][0, kv, index])
        torch.testing.assert_close(output[0, heads], expected)


def test_a_page_larger_than_k_is_still_taken_whole() -> None:
    _, selected = hybrid_attention(**random_state(90, 7), page_size=7, top_r=5, top_k=3, select="pages")
    assert (selected >= 0).sum(dim=-1).tolist() == [[7, 7]]


def test_nan_ranks_last_so_a_poisoned_head_reads_the_lowest_slots() -> None:
    state = random_state(90, 4)
    state["query"][0, 0, 3] = torch.nan
    output, selected = hybrid_attention(**state, page_size=4, top_r=5, top_k=8)
    assert selected[0, 0].tolist() == list(range(8))
    assert not torch.isnan(output[0, 4:]).any()


def test_an_empty_row_gives_zeros() -> None:
    state = random_state(90, 4)
    state["lengths"] = torch.tensor([0])
    output, selected = hybrid_attention(**state, page_size=4, top_r=5, top_k=8, token_budget=16)
    assert not output.any()
    assert (selected == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_r": 17}, r"top_r is 17; expected in 1..16"),
        ({"top_k": 0}, r"top_k is 0; expected at least 1"),
        ({"force_recent": 9}, r"force_recent is 9; expected in 0..8"),
        ({"select": "rows"}, r"select is 'rows'"),
        ({"select": "pages", "force_recent": 1}, r"expected .* without force_recent"),
        ({"dense_until": 20}, r"dense_until is 20 without a token_budget"),
        ({"page_size": 5}, r"page_min has shape \[1, 2, 23, 16\]; expected \[1, 2, 18, 16\]"),
        ({"query": torch.zeros(1, 3, 16)}, r"query has shape \[1, 3, 16\]: 3 query heads"),
        ({"query": torch.zeros(8, 16)}, r"query has shape \[8, 16\]; expected \[B,H,D\]"),
        ({"lengths": torch.tensor([91])}, r"lengths has shape \[1\] with values \[91\]; expected each in 0..90"),
        ({"values": torch.zeros(1, 2, 90, 16).double()}, r"values .* is torch.float64; expected torch.float32"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**random_state(90, 4), "page_size": 4, "top_r": 5, "top_k": 8, **change}
    with pytest.raises(ValueError, match=message):
        hybrid_attention(**arguments)
