"""KeyDiff against its rule in loops and by hand."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import keep_distinct
from kvc_trt.reference.methods.keydiff import distinctness

Case = tuple[Tensor, Tensor, list[int], int]


@st.composite
def cases(draw: Any) -> Case:
    """Keys from a few directions, zero among them, NaN past each row's end."""
    batch, kv_heads, size = (draw(st.integers(1, high)) for high in (3, 3, 4))
    slots = draw(st.integers(1, 20))
    rows = draw(st.lists(st.integers(1, slots), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    keys = (torch.randint(0, 3, (batch, kv_heads, slots, size), generator=generator) - 1).double()
    values = torch.randn(keys.shape, dtype=torch.float64, generator=generator)
    for b, n in enumerate(rows):
        keys[b, :, n:], values[b, :, n:] = torch.nan, torch.nan
    return keys, values, rows, draw(st.integers(1, slots + 2))


def score_in_loops(keys: Tensor) -> list[float]:
    """Return the scores of one head's keys [n,D], in loops."""
    scaled = []
    for key in keys.tolist():
        length = math.sqrt(sum(x * x for x in key))
        scaled.append([x / length if length else 0.0 for x in key])
    anchor = [sum(column) / len(scaled) for column in zip(*scaled, strict=True)]
    return [-sum(x * y for x, y in zip(key, anchor, strict=True)) for key in scaled]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_keydiff_equals_its_rule_written_as_loops(case: Case) -> None:
    keys, values, rows, budget = case
    kept = keep_distinct(keys, values, torch.tensor(rows), prompt_budget=budget)
    assert kept.lengths.tolist() == [min(n, budget) for n in rows]
    for b, n in enumerate(rows):
        scores = distinctness(keys[b, :, :n])
        for head in range(keys.shape[1]):
            ranked = scores[head].tolist()
            assert ranked == pytest.approx(score_in_loops(keys[b, head, :n]), abs=1e-12)
            expected = sorted(sorted(range(n), key=lambda j, s=ranked: (-s[j], j))[:budget])
            pad = kept.indices.shape[2] - len(expected)
            assert kept.indices[b, head].tolist() == expected + [-1] * pad
            for found, source in ((kept.keys, keys), (kept.values, values)):
                zeros = source.new_zeros(pad, source.shape[3])
                assert torch.equal(found[b, head], torch.cat([source[b, head, expected], zeros]))


def test_distinctness_and_kept_tokens_match_hand_computed_values() -> None:
    """Scaled keys (1,0) (1,0) (0,1) (1,0) (0,0): the anchor is (3/5, 1/5), its length does not matter."""
    keys = torch.tensor([[2.0, 0], [1, 0], [0, 3], [9, 0], [0, 0]])[None]
    torch.testing.assert_close(distinctness(keys), torch.tensor([[-0.6, -0.6, -0.2, -0.6, 0.0]]))
    kept = keep_distinct(keys[None], keys[None], torch.tensor([5]), prompt_budget=3)
    assert kept.indices.tolist() == [[[0, 2, 4]]]  # of three alike, the first


def test_only_directions_count_and_padding_does_not() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 2, 40, 8, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([40, 25])
    kept = keep_distinct(keys, keys, lengths, prompt_budget=12)
    longer = keys * torch.randint(1, 5, (2, 2, 40, 1), generator=generator)
    longer[1, :, 25:] = 1e6
    assert torch.equal(keep_distinct(longer, keys, lengths, prompt_budget=12).indices, kept.indices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_budget": 0}, "prompt_budget is 0; expected at least 1"),
        ({"keys": torch.zeros(1, 2, 5)}, r"keys has shape \[1, 2, 5\]; expected \[B,G,S,D\]"),
        ({"values": torch.zeros(1, 2, 4, 2)}, r"values has shape \[1, 2, 4, 2\]; expected \[1, 2, 5, 2\] like keys"),
        ({"prompt_lengths": torch.tensor([0])}, r"prompt_lengths .* expected each in 1\.\.5"),
        ({"keys": torch.zeros(1, 2, 5, 2).half()}, "is torch.float16; expected torch.float32 or torch.float64"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "keys": torch.zeros(1, 2, 5, 2), "values": torch.zeros(1, 2, 5, 2), "prompt_lengths": torch.tensor([5]),
        "prompt_budget": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        keep_distinct(**{**arguments, **change})
