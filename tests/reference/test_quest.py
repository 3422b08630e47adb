"""Quest against its rule written out in loops, by hand, and against hybrid attention where the two are one."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import dense_attention, page_bounds, quest_attention
from kvc_trt.reference.methods import hybrid, quest

State = dict[str, Tensor]


def state_of(query: Tensor, keys: Tensor, values: Tensor, rows: list[int], page_size: int) -> State:
    lengths = torch.tensor(rows)
    page_min, page_max = page_bounds(keys, lengths, page_size)
    cache = {"query": query, "keys": keys, "values": values, "lengths": lengths}
    return {**cache, "page_min": page_min, "page_max": page_max}


@st.composite
def cases(draw: Any) -> tuple[State, dict[str, int]]:
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
    page_size = draw(st.sampled_from([1, 2, 3, 5]))
    options = {"page_size": page_size, "top_k": page_size * draw(st.integers(1, 4))}
    if draw(st.booleans()):
        options["token_budget"] = draw(st.integers(1, slots + 3))
    return state_of(query, keys, values, rows, page_size), options


@settings(max_examples=60, deadline=None)
@given(cases())
def test_quest_attention_equals_its_rule_written_as_loops(case: tuple[State, dict[str, int]]) -> None:
    state, options = case
    output, selected = quest_attention(**state, **options)
    p, pages, budget = options["page_size"], options["top_k"] // options["page_size"], options.get("token_budget", 0)
    group = state["query"].shape[1] // state["keys"].shape[1]
    assert selected.shape == (*state["query"].shape[:2], max(options["top_k"], budget))
    for b, m in enumerate(state["lengths"].tolist()):
        count = -(-m // p)
        for head, query in enumerate(state["query"][b]):
            keys, values = state["keys"][b, head // group, :m], state["values"][b, head // group, :m]
            bounds = [(page.amin(0), page.amax(0)) for page in keys.split(p)]
            scores = [
                sum(max(float(q * x), float(q * y)) for q, x, y in zip(query, *bound, strict=True)) for bound in bounds
            ]
            best = [*sorted(range(count - 1), key=lambda j, s=scores: (-s[j], j))[: pages - 1], count - 1]
            kept = range(count) if m <= budget or count <= pages else sorted(best)
            tokens = [x for j in kept for x in range(j * p, min(j * p + p, m))]
            assert selected[b, head].tolist() == tokens + [-1] * (selected.shape[2] - len(tokens))
            weights = torch.softmax(keys[tokens] @ query / math.sqrt(len(query)), dim=0)
            torch.testing.assert_close(output[b, head], weights @ values[tokens])


def test_page_scores_and_choices_match_hand_computed_values() -> None:
    """Bounds (0,0)-(1,2), (-2,-1)-(3,0), (0,0)-(0,1), (1,1): a tie for the first head, the newest page for both."""
    keys = torch.tensor([[1.0, 0], [0, 2], [3, -1], [-2, 0], [0, 0], [0, 1], [1, 1]])[None, None]
    values = torch.stack([torch.arange(7.0), torch.ones(7)], dim=1)[None, None]
    state = state_of(torch.tensor([[[1.0, 1], [-1, 0]]]), keys, values, [7], 2)
    scores = quest.page_scores(state["query"][0], 7, state["page_min"][0], state["page_max"][0], page_size=2)
    assert scores.tolist() == [[3, 3, 1, 2], [0, 2, 0, -1]]
    output, selected = quest_attention(**state, page_size=2, top_k=4)
    assert selected.tolist() == [[[0, 1, 6, -1], [2, 3, 6, -1]]]
    first, second = math.exp(1 / math.sqrt(2)), math.exp(-3 / math.sqrt(2))
    of_first = (first**2 + 6 * first**2) / (first + 2 * first**2)  # logits 1, 2, 2 over sqrt 2
    of_second = (2 * second + 3 * first**2 + 6 / first) / (second + first**2 + 1 / first)  # -3, 2, -1
    torch.testing.assert_close(output[0], torch.tensor([[of_first, 1.0], [of_second, 1.0]]))


def random_state(m: int, group: int, page_size: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(m)
    keys, values = torch.randn(2, 1, 2, m + 9, 16, generator=generator, dtype=dtype)
    return state_of(torch.randn(1, 2 * group, 16, generator=generator, dtype=dtype), keys, values, [m], page_size)


def test_one_query_head_ranks_pages_as_hybrid_attention_does_with_every_channel() -> None:
    state = random_state(90, 1, 4)
    bounds = state["page_min"][0], state["page_max"][0]
    ranked = quest.page_scores(state["query"][0], 90, *bounds, page_size=4).argsort(dim=-1)
    found = hybrid.row_scores(state["query"][0], 90, *bounds, page_size=4, top_r=16).tokens[:, ::4]
    assert torch.equal(found.argsort(dim=-1), ranked)


@pytest.mark.parametrize("limits", [{"token_budget": 90}, {"dense_until": 90}])
def test_a_row_that_fits_is_dense_bit_for_bit(limits: dict[str, int]) -> None:
    state = random_state(90, 4, 4)
    output, selected = quest_attention(**state, page_size=4, top_k=8, **limits)
    assert torch.equal(output, dense_attention(*(state[name] for name in ("query", "keys", "values", "lengths"))))
    assert selected.tolist() == [[list(range(90))] * 8]
    longer = random_state(91, 4, 4)
    assert (quest_attention(**longer, page_size=4, top_k=8, **limits)[1] >= 0).sum(dim=-1).max() == 7


def test_nan_ranks_last_so_a_poisoned_head_reads_the_lowest_pages_and_the_newest() -> None:
    state = random_state(90, 4, 4)
    state["query"][0, 0, 3] = torch.nan
    output, selected = quest_attention(**state, page_size=4, top_k=12)
    assert selected[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 88, 89, -1, -1]
    assert not torch.isnan(output[0, 1:]).any()


def test_a_poisoned_page_is_not_read() -> None:
    state = random_state(90, 1, 4)
    state["keys"][:, :, 17] = torch.nan
    state["page_min"], state["page_max"] = page_bounds(state["keys"], state["lengths"], 4)
    output, selected = quest_attention(**state, page_size=4, top_k=84)
    assert not torch.isnan(output).any()
    assert not ((selected >= 16) & (selected < 20)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, r"page_size is 0; expected at least 1"),
        ({"top_k": 3}, r"top_k is 3; expected at least 4"),
        ({"page_size": 5}, r"page_min has shape \[1, 2, 25, 16\]; expected \[1, 2, 20, 16\]"),
        ({"query": torch.zeros(1, 3, 16)}, r"query has shape \[1, 3, 16\]: 3 query heads"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**random_state(90, 4, 4), "page_size": 4, "top_k": 8, **change}
    with pytest.raises(ValueError, match=message):
        quest_attention(**arguments)
