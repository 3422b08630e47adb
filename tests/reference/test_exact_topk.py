"""The oracle against its rule in loops: the best tokens of each query head, or of each group."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import dense_attention, exact_topk


@st.composite
def cases(draw: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantised caches of unequal rows, so that logits tie, with NaN past each row's end."""
    batch, kv_heads, group, size = (draw(st.integers(1, high)) for high in (3, 2, 4, 4))
    slots = draw(st.integers(1, 20))
    rows = draw(st.lists(st.integers(1, slots), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def quantised(*shape: int) -> Tensor:
        return (torch.randint(0, 5, shape, generator=generator) - 2).double() / 2

    query = quantised(batch, kv_heads * group, size)
    keys, values = quantised(batch, kv_heads, slots, size), quantised(batch, kv_heads, slots, size)
    for b, m in enumerate(rows):
        keys[b, :, m:], values[b, :, m:] = torch.nan, torch.nan
    state = {"query": query, "keys": keys, "values": values, "lengths": torch.tensor(rows)}
    limits = {"top_k": draw(st.integers(1, slots + 2)), "dense_until": draw(st.sampled_from([0, slots // 2, slots]))}
    return state, {**limits, "per_query_head": draw(st.booleans())}


def probabilities(query: Tensor, keys: Tensor) -> list[float]:
    logits = [float(query @ key) / math.sqrt(len(query)) for key in keys]
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


@settings(max_examples=100)
@given(cases())
def test_exact_topk_equals_its_rule_written_as_loops(case: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    state, options = case
    found = exact_topk(**state, **options)
    assert found.selected is not None
    top_k, dense_until, alone = options["top_k"], options["dense_until"], options["per_query_head"]
    heads, kv_heads = state["query"].shape[1], state["keys"].shape[1]
    group = heads // kv_heads
    assert found.selected.shape == (len(found.output), heads if alone else kv_heads, max(top_k, dense_until))
    for b, m in enumerate(state["lengths"].tolist()):
        for head, query in enumerate(state["query"][b]):
            keys, values = (state[name][b, head // group, :m] for name in ("keys", "values"))
            index = [x for x in found.selected[b, head if alone else head // group].tolist() if x >= 0]
            first = head if alone else head // group * group
            sharing = state["query"][b, first : first + (1 if alone else group)]
            rank = [sum(column) for column in zip(*(probabilities(one, keys) for one in sharing), strict=True)]
            count = m if m <= max(top_k, dense_until) else top_k
            assert index == sorted(set(index))
            assert len(index) == count
            left = [rank[x] for x in range(m) if x not in index]
            assert not left or min(rank[x] for x in index) >= max(left) - 1e-12
            weights = torch.softmax(query @ keys[index].T / math.sqrt(len(query)), dim=0)
            torch.testing.assert_close(found.output[b, head], weights @ values[index])


def test_equal_tokens_are_taken_from_the_front() -> None:
    query, keys = torch.ones(1, 4, 3), torch.ones(1, 2, 9, 3)
    for per_query_head in (True, False):
        found = exact_topk(query, keys, keys, torch.tensor([9]), top_k=4, per_query_head=per_query_head)
        assert found.selected is not None
        assert found.selected.tolist() == [[[0, 1, 2, 3]] * (4 if per_query_head else 2)]


@pytest.mark.parametrize("per_query_head", [True, False])
@pytest.mark.parametrize("limits", [{"top_k": 90}, {"top_k": 8, "dense_until": 90}])
def test_a_row_that_fits_is_dense_bit_for_bit(limits: dict[str, int], per_query_head: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, *shape, generator=generator) for shape in ((8, 16), (2, 90, 16), (2, 90, 16)))
    lengths = torch.tensor([90])
    found = exact_topk(query, keys, values, lengths, per_query_head=per_query_head, **limits)
    assert torch.equal(found.output, dense_attention(query, keys, values, lengths))
    assert found.selected is not None
    assert found.selected.tolist() == [[list(range(90))] * (8 if per_query_head else 2)]


def test_probabilities_that_vanish_are_still_ranked() -> None:
    """float32 softmax gives 0 to all but the first of these; a head alone ranks what it was computed from."""
    keys = torch.tensor([900.0, 100.0, 300.0, 200.0])[None, None, :, None]
    found = exact_topk(torch.ones(1, 1, 1), keys, keys, torch.tensor([4]), top_k=2)
    assert found.selected is not None
    assert found.selected.tolist() == [[[0, 2]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k is 0; expected at least 1"),
        ({"lengths": torch.tensor([10])}, r"lengths has shape \[1\] with values \[10\]; expected each in 0..9"),
        ({"query": torch.zeros(1, 3, 4)}, "3 query heads; expected a multiple of 2"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 4, 4), "keys": torch.zeros(1, 2, 9, 4), "values": torch.zeros(1, 2, 9, 4),
        "lengths": torch.tensor([9]), "top_k": 3, **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        exact_topk(**arguments)
