"""Stage 1 against the rule written out in loops, over shapes and ties that a program might get wrong."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import compact, compaction

Case = tuple[Tensor, Tensor, Tensor, list[int], int, int]


@st.composite
def cases(draw: Any) -> Case:
    """Coarsely quantised inputs, so that ties are everywhere; padding is NaN, so that a leak cannot stay hidden."""
    batch, kv_heads, group, size = (draw(st.integers(1, high)) for high in (3, 2, 4, 4))
    length, window = draw(st.integers(1, 24)), draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(1, length), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    levels = draw(st.sampled_from([2, 3, 9]))

    def quantised(*shape: int) -> Tensor:
        return (torch.randint(0, levels, shape, generator=generator) - levels // 2).double() / 2

    q_window = quantised(batch, kv_heads * group, window, size)
    keys, values = quantised(batch, kv_heads, length, size), quantised(batch, kv_heads, length, size)
    for b, n in enumerate(rows):
        keys[b, :, n:] = torch.nan
        q_window[b, :, : max(0, window - n)] = torch.nan
    budget = draw(st.integers(window, max(window, length) + 3))
    return q_window, keys, values, rows, budget, 2 * draw(st.integers(0, length)) + 1


def votes(q_window: Tensor, keys: Tensor, kernel: int) -> list[float]:
    """Steps 2 to 7 for one KV head, in loops: q_window [g,W,D], keys [n,D] -> n-W pooled scores."""
    n, window = len(keys), q_window.shape[1]
    summed = [0.0] * (n - window)
    for head in q_window:
        for i, query in enumerate(head):
            visible = n - window + i + 1
            logits = [float(query @ keys[j]) / math.sqrt(len(query)) for j in range(visible)]
            weights = [math.exp(x - max(logits)) for x in logits]
            for j in range(n - window):
                summed[j] += weights[j] / sum(weights)
    half = kernel // 2
    return [max(summed[max(0, j - half) : j + half + 1]) for j in range(n - window)]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_compaction_equals_its_rule_written_as_loops(case: Case) -> None:
    q_window, keys, values, rows, budget, kernel = case
    before = [tensor.clone() for tensor in (q_window, keys, values)]
    lengths = torch.tensor(rows)
    kept = compact(q_window, keys, values, lengths, prompt_budget=budget, pool_kernel=kernel)
    scores = compaction.scores(q_window, keys, lengths, pool_kernel=kernel).values
    assert kept.keys.shape == (*keys.shape[:2], min(budget, keys.shape[2]), keys.shape[3])
    assert kept.lengths.tolist() == [min(n, budget) for n in rows]
    window, group = q_window.shape[2], q_window.shape[1] // keys.shape[1]
    for b, n in enumerate(rows):
        for kv in range(keys.shape[1]):
            index = list(range(n))
            if n > budget:
                ranked = scores[b, kv, : n - window].tolist()
                expected = votes(q_window[b, kv * group : (kv + 1) * group], keys[b, kv, :n], kernel)
                assert ranked == pytest.approx(expected, rel=1e-12)
                best = sorted(range(n - window), key=lambda j, v=ranked: (-v[j], j))[: budget - window]
                index = sorted(best) + index[n - window :]
            pad = kept.keys.shape[2] - len(index)
            assert kept.indices[b, kv].tolist() == index + [-1] * pad
            for found, source in ((kept.keys, keys), (kept.values, values)):
                assert torch.equal(
                    found[b, kv], torch.cat([source[b, kv, index], source.new_zeros(pad, source.shape[3])])
                )
    for tensor, copy in zip((q_window, keys, values), before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), copy.nan_to_num(7))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_row_is_the_same_alone_and_in_a_batch(case: Case) -> None:
    q_window, keys, values, rows, budget, kernel = case
    options = {"prompt_budget": budget, "pool_kernel": kernel}
    together = compact(q_window, keys, values, torch.tensor(rows), **options)
    for b, n in enumerate(rows):
        one = slice(b, b + 1)
        alone = compact(q_window[one], keys[one, :, :n], values[one, :, :n], torch.tensor([n]), **options)
        width = alone.indices.shape[2]
        assert torch.equal(together.indices[one, :, :width], alone.indices)
        assert torch.equal(together.keys[one, :, :width], alone.keys)


def random_case(n: int, window: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    draw = [torch.randn(1, heads, length, 8, generator=generator) for heads, length in ((4, window), (2, n), (2, n))]
    return draw[0].to(dtype), draw[1].to(dtype), draw[2].to(dtype), torch.tensor([n])


@pytest.mark.parametrize(("n", "evicted"), [(3, 0), (4, 0), (20, 0), (21, 1), (300, 280)])
def test_eviction_begins_strictly_above_the_budget(n: int, evicted: int) -> None:
    kept = compact(*random_case(n), prompt_budget=20, pool_kernel=5)
    assert n - kept.lengths.item() == evicted
    assert kept.indices[0, :, -min(n, 4) :].tolist() == [list(range(n - min(n, 4), n))] * 2


def test_a_budget_of_just_the_window_keeps_the_window() -> None:
    assert compact(*random_case(50), prompt_budget=4, pool_kernel=5).indices.tolist() == [[[46, 47, 48, 49]] * 2]


def test_a_kernel_wider_than_the_prompt_makes_one_plateau() -> None:
    kept = compact(*random_case(50), prompt_budget=10, pool_kernel=201)
    assert kept.indices.tolist() == [[[0, 1, 2, 3, 4, 5, 46, 47, 48, 49]] * 2]


def test_pooling_sees_no_window_column() -> None:
    """The key of a window token attracts every vote; its neighbour outside the window must not profit."""
    q_window, keys, _, lengths = random_case(50)
    keys[..., 46:, :] = 20 * q_window[:, :2, -1:].mean(dim=2, keepdim=True)
    scores = compaction.scores(q_window, keys, lengths, pool_kernel=3).values[..., :46]
    plain = compaction.scores(q_window, keys, lengths, pool_kernel=1).values[..., :46]
    assert torch.equal(scores[..., 45], plain[..., 44:].amax(dim=-1))


def test_nan_ranks_last_so_a_poisoned_head_keeps_the_lowest_indices() -> None:
    q_window, keys, values, lengths = random_case(50)
    clean = compact(q_window, keys, values, lengths, prompt_budget=10, pool_kernel=3)
    keys[0, 0, 30] = torch.nan
    kept = compact(q_window, keys, values, lengths, prompt_budget=10, pool_kernel=3)
    assert kept.indices[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 46, 47, 48, 49]
    assert torch.equal(kept.indices[0, 1], clean.indices[0, 1])


def test_infinite_keys_are_indices_too() -> None:
    q_window, keys, values, lengths = random_case(50)
    keys[0, :, 20] = torch.inf
    kept = compact(q_window, keys, values, lengths, prompt_budget=10, pool_kernel=3)
    assert all(row == sorted(set(row)) for row in kept.indices[0].tolist())


def test_single_precision_chooses_what_double_precision_chooses() -> None:
    single = compact(*random_case(2000), prompt_budget=300, pool_kernel=63)
    double = compact(*random_case(2000, dtype=torch.float64), prompt_budget=300, pool_kernel=63)
    assert torch.equal(single.indices, double.indices)


def test_a_long_prompt_is_not_quadratic() -> None:
    """At 100,000 tokens a table of all pairs would need 40 GB."""
    kept = compact(*random_case(100_000), prompt_budget=500, pool_kernel=63)
    assert kept.lengths.tolist() == [500]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool_kernel": 4}, r"pool_kernel is 4; expected an odd number"),
        ({"prompt_budget": 3}, r"prompt_budget is 3; expected at least 4"),
        (
            {"q_window": torch.zeros(1, 3, 4, 8)},
            r"q_window has shape \[1, 3, 4, 8\]: 3 query heads; expected a multiple of 2",
        ),
        ({"q_window": torch.zeros(1, 4, 4, 6)}, r"q_window has shape \[1, 4, 4, 6\]; expected \[B=1,H,W,D=8\]"),
        (
            {"q_window": torch.zeros(1, 4, 4, 8).half()},
            r"q_window \[1, 4, 4, 8\] is torch.float16; expected torch.float32",
        ),
        ({"keys": torch.zeros(2, 50, 8)}, r"keys has shape \[2, 50, 8\]; expected \[B,G,S,D\]"),
        ({"values": torch.zeros(1, 2, 49, 8)}, r"values has shape \[1, 2, 49, 8\]; expected \[1, 2, 50, 8\] like keys"),
        (
            {"prompt_lengths": torch.tensor([51])},
            r"prompt_lengths has shape \[1\] with values \[51\]; expected each in 1..50",
        ),
        ({"prompt_lengths": torch.tensor([0])}, r"expected each in 1..50"),
        ({"prompt_lengths": torch.tensor([3, 4])}, r"prompt_lengths has shape \[2\] .*expected \[B=1\]"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    names = ("q_window", "keys", "values", "prompt_lengths")
    arguments = {**dict(zip(names, random_case(50), strict=True)), "prompt_budget": 10, "pool_kernel": 3, **change}
    with pytest.raises(ValueError, match=message):
        compact(**arguments)
