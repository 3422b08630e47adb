"""Expected Attention against its rule in loops, by hand, and against the mean of drawn queries."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvc_trt.reference import ExpectedQueries, expected_queries, future_rotation, keep_expected
from kvc_trt.reference.methods.expected_attention import expected_attention

State = dict[str, Any]


def table(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Rotary tables of every position below `length`: two of [length,size/2]."""
    angles = torch.arange(length).double()[:, None] * 10.0 ** -torch.arange(size // 2).double()
    return angles.cos(), angles.sin()


def rotation_matrix(cosine: list[float], sine: list[float]) -> list[list[float]]:
    """R [D,D] whose pairs are (i, i + D/2)."""
    half = len(cosine)
    matrix = [[0.0] * (2 * half) for _ in range(2 * half)]
    for i, (c, s) in enumerate(zip(cosine, sine, strict=True)):
        matrix[i][i], matrix[i][i + half], matrix[i + half][i], matrix[i + half][i + half] = c, -s, s, c
    return matrix


@st.composite
def cases(draw: Any) -> tuple[State, dict[str, Any], int]:
    """Prompts of unequal length with NaN past each row's end; coarse values, so that scores tie."""
    batch, kv_heads, group = (draw(st.integers(1, high)) for high in (3, 2, 3))
    size, sinks = draw(st.sampled_from([2, 4])), draw(st.integers(0, 4))
    slots = draw(st.integers(1, 14))
    rows = draw(st.lists(st.integers(1, slots), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def quantised(*shape: int) -> Tensor:
        return (torch.randint(0, 5, shape, generator=generator) - 2).double() / 2

    queries = quantised(batch, kv_heads * group, slots, size)
    keys, values = quantised(batch, kv_heads, slots, size), quantised(batch, kv_heads, slots, size)
    for b, n in enumerate(rows):
        for tensor in (queries, keys, values):
            tensor[b, :, n:] = torch.nan
    state = {"queries": queries, "keys": keys, "values": values, "prompt_lengths": torch.tensor(rows)}
    options = {
        "prompt_budget": draw(st.integers(sinks + 1, sinks + slots)),
        "sinks": sinks,
        "use_covariance": draw(st.booleans()),
        "use_value_norm": draw(st.booleans()),
        "epsilon": draw(st.sampled_from([0.0, 0.02])),
    }
    return state, options, draw(st.integers(1, 6))


def run(state: State, options: dict[str, Any], future: int) -> Any:
    tables = table(state["keys"].shape[2] + future, state["keys"].shape[3])
    rotation = future_rotation(*tables, state["prompt_lengths"], future_positions=future)
    queries = expected_queries(state["queries"], rotation, state["prompt_lengths"], sinks=options["sinks"])
    return keep_expected(queries, state["keys"], state["values"], state["prompt_lengths"], **options)


def logits_of_head(queries: Tensor, keys: Tensor, first: int, future: int, covariance: bool) -> list[float]:
    """Steps 1 to 3 for one query head: queries [n,D] without sinks, keys [n,D], the prompt's length."""
    size, count = queries.shape[1], len(queries)
    mean = [sum(column) / count for column in queries.T.tolist()]
    centred = [[x - m for x, m in zip(row, mean, strict=True)] for row in queries.tolist()]
    spread = [[sum(row[i] * row[j] for row in centred) / count for j in range(size)] for i in range(size)]
    cosine, sine = (part[first : first + future].mean(dim=0).tolist() for part in table(first + future, size))
    turn = torch.tensor(rotation_matrix(cosine, sine), dtype=torch.float64)
    ahead, wide = turn @ torch.tensor(mean).double(), turn @ torch.tensor(spread).double() @ turn.T
    found = []
    for key in keys:
        logit = float(ahead @ key) / math.sqrt(size)
        found.append(logit + (float(key @ wide @ key) / (2 * size) if covariance else 0.0))
    return found


@settings(max_examples=120, deadline=None)
@given(cases())
def test_expected_attention_equals_its_rule_written_as_loops(case: tuple[State, dict[str, Any], int]) -> None:
    state, options, future = case
    kept = run(state, options, future)
    queries, keys, values, lengths = state.values()
    sinks, budget, group = options["sinks"], options["prompt_budget"], queries.shape[1] // keys.shape[1]
    assert kept.lengths.tolist() == [min(n, budget) for n in lengths.tolist()]
    for b, n in enumerate(lengths.tolist()):
        for kv in range(keys.shape[1]):
            index = kept.indices[b, kv][kept.indices[b, kv] >= 0].tolist()
            if n <= budget:
                assert index == list(range(n))
                continue
            score = [0.0] * (n - sinks)
            for head in range(kv * group, (kv + 1) * group):
                seen = queries[b, head, sinks:n], keys[b, kv, sinks:n]
                logits = logits_of_head(*seen, n, future, options["use_covariance"])
                weights = [math.exp(x - max(logits)) for x in logits]
                for j, weight in enumerate(weights):
                    score[j] += weight / sum(weights) / group
            if options["use_value_norm"]:
                lengths_of = [math.sqrt(sum(x * x for x in v)) for v in values[b, kv, sinks:n].tolist()]
                score = [(x + options["epsilon"]) * y for x, y in zip(score, lengths_of, strict=True)]
            assert index[:sinks] == list(range(sinks))
            assert index == sorted(set(index))
            chosen, others = [score[j - sinks] for j in index[sinks:]], set(range(sinks, n)) - set(index)
            assert min(chosen) >= max((score[j - sinks] for j in others), default=-1.0) - 1e-12
            assert torch.equal(kept.keys[b, kv, : len(index)], keys[b, kv, index])
            assert torch.equal(kept.values[b, kv, : len(index)], values[b, kv, index])


UNTURNED = torch.ones(1, 1), torch.zeros(1, 1)


def test_query_statistics_match_hand_computed_values() -> None:
    """Without the sink: (1, 0) and (3, 4), whose mean is (2, 2) and whose deviations are (1, 2) and its negative."""
    queries = torch.tensor([[99.0, 99], [1, 0], [3, 4], [torch.nan, torch.nan]])[None, None]
    mean, covariance = expected_queries(queries, UNTURNED, torch.tensor([3]), sinks=1)
    assert mean.tolist() == [[[2.0, 2.0]]]
    assert covariance.tolist() == [[[[1.0, 2.0], [2.0, 4.0]]]]
    nothing = expected_queries(queries, UNTURNED, torch.tensor([1]), sinks=1)
    assert not nothing.mean.any()
    assert not nothing.covariance.any()


def test_scores_match_hand_computed_values() -> None:
    """Mean (0, 2), covariance diag(4, 0): of the keys (0, 0), (1, 0) and (0, 1), D = 2, logits 0, 1 and sqrt 2."""
    mean, covariance = torch.tensor([[0.0, 2.0]]), torch.tensor([[[4.0, 0.0], [0.0, 0.0]]])
    keys, values = torch.tensor([[[0.0, 0], [1, 0], [0, 1]]]), torch.tensor([[[3.0, 4], [0, 1], [0, 0]]])
    weights = torch.tensor([1.0, math.e, math.exp(math.sqrt(2))])
    expected = (weights / weights.sum() + 0.5) * torch.tensor([5.0, 1.0, 0.0])
    found = expected_attention(mean, covariance, keys, values, use_value_norm=True, epsilon=0.5)
    torch.testing.assert_close(found[0], expected)


def test_future_rotation_matches_hand_computed_values() -> None:
    """For angles 0 and 90 degrees the mean is (1/2, 1/2); after one position of 90 degrees (-1/2, 1/2)."""
    cosine, sine = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    rotation = future_rotation(cosine, sine, torch.tensor([1]), future_positions=2)
    assert [part.tolist() for part in rotation] == [[[-0.5]], [[0.5]]]
    turned = torch.tensor([[0.0]]), torch.tensor([[1.0]])  # (x, y) to (-y, x)
    ahead = expected_queries(torch.tensor([[1.0, 0], [3, 4]])[None, None], turned, torch.tensor([2]), sinks=0)
    assert ahead.mean.tolist() == [[[-2.0, 2.0]]]
    assert ahead.covariance.tolist() == [[[[4.0, -2.0], [-2.0, 1.0]]]]


def test_the_rotation_is_the_mean_over_the_positions_to_come() -> None:
    cosine, sine = table(500, 8)
    for n in (0, 7, 450):
        found = future_rotation(cosine, sine, torch.tensor([n]), future_positions=40)
        for part, whole in zip(found, (cosine, sine), strict=True):
            torch.testing.assert_close(part[0], whole[n : n + 40].mean(dim=0))


def test_the_formula_is_the_mean_over_a_normal_distribution() -> None:
    """E exp(q.k / sqrt D) over drawn queries; 400,000 of them agree to a percent."""
    generator = torch.Generator().manual_seed(1)
    factor, mean = torch.randn(4, 4, dtype=torch.float64, generator=generator) / 2, torch.tensor([0.3, -0.2, 0.5, 0.0])
    drawn = mean.double() + torch.randn(400_000, 4, dtype=torch.float64, generator=generator) @ factor.T
    keys = torch.randn(1, 5, 4, dtype=torch.float64, generator=generator)
    exact = torch.exp(drawn @ keys[0].T / 2).mean(dim=0)
    ours = expected_attention(
        mean.double()[None], (factor @ factor.T)[None], keys, keys, use_value_norm=False, epsilon=0.0
    )
    torch.testing.assert_close(ours[0], exact / exact.sum(), rtol=1e-2, atol=0)


def test_equal_scores_go_to_the_lowest() -> None:
    same = torch.ones(1, 1, 9, 2)
    queries = expected_queries(torch.ones(1, 2, 9, 2), UNTURNED, torch.tensor([9]), sinks=2)
    kept = keep_expected(queries, same, same, torch.tensor([9]), prompt_budget=5, sinks=2)
    assert kept.indices.tolist() == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_budget": 2}, "prompt_budget is 2; expected at least 3"),
        ({"sinks": -1}, "sinks is -1; expected at least 0"),
        ({"keys": torch.zeros(1, 3, 5, 2)}, r"values has shape \[1, 2, 5, 2\]; expected \[1, 3, 5, 2\] like keys"),
        (
            {"queries": ExpectedQueries(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2, 2))},
            r"queries.mean has shape \[1, 3, 2\]: 3 query heads; expected a multiple of 2 KV heads",
        ),
        (
            {"queries": ExpectedQueries(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))},
            r"queries.covariance has shape \[1, 4, 2\]; expected \[1, 4, 2, 2\]",
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "queries": ExpectedQueries(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2, 2)),
        "keys": torch.zeros(1, 2, 5, 2),
        "values": torch.zeros(1, 2, 5, 2), "prompt_lengths": torch.tensor([5]), "prompt_budget": 4, "sinks": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        keep_expected(**{**arguments, **change})


@pytest.mark.parametrize(("rows", "future"), [([10], 4), ([3], 0), ([3], 11), ([-1], 2)])
def test_positions_beyond_the_rotary_table_are_refused(rows: list[int], future: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        future_rotation(*table(10, 4), torch.tensor(rows), future_positions=future)


def test_a_rotation_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rotation \(cosine\) has shape \[1, 2\]; expected \[1,1\]"):
        expected_queries(torch.zeros(1, 2, 5, 2), (torch.ones(1, 2), torch.ones(1, 1)), torch.tensor([5]), sinks=2)
