"""TOVA against its rule in loops and by hand: the tokens that a prompt keeps, the token that a step drops."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import dense_attention, keep_attended, tova_attention

Case = tuple[Tensor, Tensor, Tensor, list[int], int, int]


@st.composite
def cases(draw: Any) -> Case:
    """Quantised prompts of unequal length, so that scores tie, with NaN past each row's end."""
    batch, kv_heads, group, size = (draw(st.integers(1, high)) for high in (3, 3, 3, 4))
    slots = draw(st.integers(1, 20))
    rows = draw(st.lists(st.integers(1, slots), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def quantised(*shape: int) -> Tensor:
        return (torch.randint(0, 3, shape, generator=generator) - 1).double()

    query = quantised(batch, kv_heads * group, size)
    keys, values = quantised(batch, kv_heads, slots, size), quantised(batch, kv_heads, slots, size)
    for b, n in enumerate(rows):
        keys[b, :, n:], values[b, :, n:] = torch.nan, torch.nan
    return query, keys, values, rows, draw(st.integers(0, slots)), draw(st.integers(1, 4))


def paid(query: Tensor, keys: Tensor) -> list[float]:
    """Return the attention that all heads [H,D] of a layer pay to each key [G,n,D]."""
    total = [0.0] * keys.shape[1]
    for head, q in enumerate(query):
        stored = keys[head // (len(query) // len(keys))]
        logits = [float(q @ key) / math.sqrt(len(q)) for key in stored]
        weights = [math.exp(x - max(logits)) for x in logits]
        for j, weight in enumerate(weights):
            total[j] += weight / sum(weights)
    return total


def left(score: list[float], heavy: int, recent: int) -> list[int]:
    """Positions that stay; scores equal to rounding are ties."""
    n = len(score)
    if n <= heavy + recent:
        return list(range(n))
    old = range(n - recent)
    return sorted(sorted(old, key=lambda j: (-round(score[j], 9), j))[:heavy]) + list(range(n - recent, n))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_tova_equals_its_rule_written_as_loops(case: Case) -> None:
    query, keys, values, rows, heavy, recent = case
    before = [tensor.clone() for tensor in (query, keys, values)]
    lengths = torch.tensor(rows)
    kept = keep_attended(query[:, :, None], keys, values, lengths, heavy=heavy, recent=recent)
    step = tova_attention(query, keys, values, lengths, heavy=heavy, recent=recent)
    assert step.kept is not None
    assert torch.equal(step.output, dense_attention(query, keys, values, lengths))
    assert kept.lengths.tolist() == [min(n, heavy + recent) for n in rows]
    for b, n in enumerate(rows):
        ties = paid(query[b], keys[b, :, :n])
        expected = left(ties, heavy, recent)
        for found in (kept.indices[b, :, : len(expected)].tolist(), step.kept[b].tolist()):
            assert all(one == found[0] for one in found)  # a layer has one list
            assert sorted(round(ties[j], 9) for j in found[0]) == sorted(round(ties[j], 9) for j in expected)
            assert found[0] == sorted(found[0])
            assert found[0][-min(recent, n) :] == expected[-min(recent, n) :]
        index = kept.indices[b, 0, : len(expected)].long()
        assert torch.equal(kept.keys[b, :, : len(expected)], keys[b, :, index])
        assert torch.equal(kept.values[b, :, : len(expected)], values[b, :, index])
        assert (kept.indices[b, :, len(expected) :] == -1).all()
        assert not kept.keys[b, :, len(expected) :].any()
    assert all(
        torch.equal(
            a,
            b,
        )
        or torch.equal(a.isnan(), b.isnan())
        for a, b in zip(before, (query, keys, values), strict=True)
    )


def column(*numbers: float) -> Tensor:
    """One row, one head, one channel: [1,1,n,1]."""
    return torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]


def test_a_prompt_and_a_step_match_hand_computed_values() -> None:
    """The last query is 1, and the keys are the logarithms of the attention they receive: 1 4 2 3 5 of 15."""
    keys = column(*(math.log(x) for x in (1, 4, 2, 3, 5)))
    queries = torch.cat([column(-7.0), column(1.0)], dim=2)  # the one before last does not count
    kept = keep_attended(queries, keys, keys, torch.tensor([5]), heavy=2, recent=1)
    assert kept.indices.tolist() == [[[1, 3, 4]]]
    # A key of log 2 enters: 4 3 5 2 of 14. The newest stays, of the others 3 has least.
    cache = column(*(math.log(x) for x in (4, 3, 5, 2)))
    step = tova_attention(column(1.0)[:, :, 0], cache, column(1, 2, 3, 4), torch.tensor([4]), heavy=2, recent=1)
    assert step.output.item() == pytest.approx((4 + 2 * 3 + 3 * 5 + 4 * 2) / 14)
    assert step.kept is not None
    assert step.kept[0].tolist() == [[0, 2, 3]]
    assert step.scores is None


def test_ties_go_to_the_lowest_and_heads_count_alike() -> None:
    same = torch.zeros(1, 2, 6, 4)
    kept = keep_attended(torch.ones(1, 4, 1, 4), same, same, torch.tensor([6]), heavy=2, recent=2)
    assert kept.indices.tolist() == [[[0, 1, 4, 5]] * 2]
    # Head 0 pays 8 1 1 1 of 11, head 1 of the other KV head 1 1 9 1 of 12: together 2 comes first, then 0.
    keys = torch.log(torch.tensor([[[8.0, 1, 1, 1]], [[1.0, 1, 9, 1]]])).transpose(1, 2)[None]
    kept = keep_attended(torch.ones(1, 2, 1, 1), keys, keys, torch.tensor([4]), heavy=1, recent=1)
    assert kept.indices.tolist() == [[[2, 3]] * 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heavy": -1}, "heavy is -1; expected at least 0"),
        ({"recent": 0}, "recent is 0; expected at least 1"),
        ({"queries": torch.zeros(1, 3, 1, 2)}, r"queries has shape \[1, 3, 1, 2\]: 3 query heads; expected a multiple"),
        ({"queries": torch.zeros(1, 2, 0, 2)}, r"the window \(queries.shape\[2\]\) is 0"),
        ({"values": torch.zeros(1, 2, 5, 3)}, r"values has shape \[1, 2, 5, 3\]; expected \[1, 2, 5, 2\] like keys"),
        ({"prompt_lengths": torch.tensor([6])}, r"prompt_lengths .* expected each in 1\.\.5"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "queries": torch.zeros(1, 2, 1, 2), "keys": torch.zeros(1, 2, 5, 2), "values": torch.zeros(1, 2, 5, 2),
        "prompt_lengths": torch.tensor([5]), "heavy": 2, "recent": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        keep_attended(**{**arguments, **change})
