"""Methods that drop a token for each that they append: worked out by hand, and as masked full attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt.reference import LayerCache, heavy_hitter_attention, keep_heavy_hitters, keep_recent
from kvc_trt.reference.methods.heavy_hitters import received_in_prompt, stay
from kvc_trt.reference.methods.recent import make_room
from tests.reference.test_decoder_under_policies import Masked, prompts

NEW = 60
POLICIES: dict[str, dict[str, Any]] = {"streaming-llm": {}, "sliding-window": {}, "h2o": {}, "tova": {}}


def column(*numbers: float) -> Tensor:
    """One row, one head, one channel: [1,1,n,1]."""
    return torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]


def test_the_first_and_the_last_tokens_of_a_prompt() -> None:
    keys = torch.arange(20.0).reshape(2, 1, 10, 1).expand(2, 3, 10, 1)
    kept = keep_recent(keys, -keys, torch.tensor([10, 6]), slots=6, sinks=2)
    assert kept.indices.tolist() == [[[0, 1, 6, 7, 8, 9]] * 3, [[0, 1, 2, 3, 4, 5]] * 3]
    assert kept.keys[:, 1, :, 0].tolist() == [[0, 1, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15]]
    assert torch.equal(kept.values, -kept.keys)
    assert kept.lengths.tolist() == [6, 6]


def test_room_is_made_behind_the_sinks_of_full_rows_alone() -> None:
    keys = torch.arange(1.0, 13.0).reshape(2, 1, 6, 1)
    cache = LayerCache(keys.clone(), keys.clone(), torch.tensor([6, 5]), positions=keys[..., 0].long())
    make_room(cache, slots=[6, 6], sinks=2)
    assert cache.keys[..., 0].tolist() == [[[1, 2, 4, 5, 6, 0]], [[7, 8, 9, 10, 11, 12]]]
    assert cache.positions is not None
    assert cache.positions[0].tolist() == [[1, 2, 4, 5, 6, 0]]
    assert cache.lengths.tolist() == [5, 5]


def test_heavy_hitters_match_hand_computed_values() -> None:
    """Queries of 1 and the keys 0, ln 3, 0, 0: rows 1 | 1/4 3/4 | 1/5 3/5 1/5 | 1/6 3/6 1/6 1/6."""
    keys, values = column(0, math.log(3), 0, 0), column(0, 1, 2, 3)
    kept = keep_heavy_hitters(torch.ones_like(keys), keys, values, torch.tensor([4]), heavy=1, recent=2)
    assert kept.indices.tolist() == [[[1, 2, 3]]]
    assert kept.scores is not None
    expected = [0.75 + 0.6 + 0.5, 0.2 + 1 / 6, 1 / 6]
    torch.testing.assert_close(kept.scores[0, 0], torch.tensor(expected, dtype=torch.float64))
    # The new key is ln 2: weights 3, 1, 1, 2 of 7. Positions 3 and 4 are recent; of 1 and 2 the latter has less.
    state = [torch.cat([table, column(new)], 2) for table, new in ((kept.keys, math.log(2)), (kept.values, 4))]
    sums = torch.cat([kept.scores, column(0)[..., 0]], 2)
    step = heavy_hitter_attention(column(1)[:, :, 0], *state, torch.tensor([4]), sums, heavy=1, recent=2)
    assert step.output.item() == pytest.approx((3 * 1 + 2 + 3 + 2 * 4) / 7)
    assert step.kept is not None
    assert step.kept[0].tolist() == [[0, 2, 3]]
    after = [expected[0] + 3 / 7, expected[1] + 1 / 7, expected[2] + 1 / 7, 2 / 7]
    assert step.scores is not None
    torch.testing.assert_close(step.scores[0, 0], torch.tensor(after, dtype=torch.float64))


def test_a_group_adds_up_and_ties_go_to_the_lowest() -> None:
    queries, keys = torch.zeros(1, 4, 3, 2), torch.ones(1, 2, 3, 2)
    kept = keep_heavy_hitters(queries, keys, keys, torch.tensor([3]), heavy=2, recent=1)
    thirds = torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    assert kept.scores is not None
    torch.testing.assert_close(kept.scores[0], 2 * thirds.expand(2, 3))
    found = stay(torch.tensor([[2.0, 1.0, 2.0, 1.0, math.nan, 0.0, 0.0]]), heavy=3, recent=2)
    assert found.tolist() == [[0, 1, 2, 5, 6]]
    assert stay(torch.zeros(1, 5), heavy=3, recent=2).tolist() == [[0, 1, 2, 3, 4]]


def test_blocks_change_nothing_and_all_that_is_paid_is_received() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(heads, 100, 8, dtype=torch.float64, generator=generator) for heads in (6, 2))
    whole = received_in_prompt(queries, keys)
    torch.testing.assert_close(received_in_prompt(queries, keys, block=7), whole)
    assert whole.sum(dim=1).tolist() == pytest.approx([300.0, 300.0])  # three heads of a hundred queries


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"slots": 4, "sinks": 4}), "sinks is 4; expected in 0..3"),
        (({"slots": 0, "sinks": 0}), "slots is 0; expected at least 1"),
    ],
)
def test_invalid_numbers_are_refused_by_name(arguments: dict[str, int], message: str) -> None:
    keys = torch.zeros(1, 1, 5, 2)
    with pytest.raises(ValueError, match=message):
        keep_recent(keys, keys, torch.tensor([5]), **arguments)


def test_all_queries_of_a_prompt_are_needed() -> None:
    keys = torch.zeros(1, 1, 5, 2)
    with pytest.raises(ValueError, match=r"prompt_lengths .* expected each in 1\.\.4"):
        keep_heavy_hitters(keys[:, :, 1:], keys, keys, torch.tensor([5]), heavy=1, recent=1)


def positions_of(layer: LayerCache) -> list[list[list[int]]]:
    """Logical positions of the entries of each row and KV head."""
    assert layer.positions is not None
    rows = zip(layer.positions, layer.lengths.tolist(), strict=True)
    return [[head[:m].tolist() for head in heads] for heads, m in rows]


@pytest.mark.parametrize("policy", POLICIES)
def test_dropped_tokens_are_as_if_masked(policy: str, family: Callable[..., Any]) -> None:
    pair = family("llama3.1")
    lengths = [150, 40, 3]
    ids, n, following = prompts(pair, lengths, NEW)
    evicting = pair.decoder(policy, 20, 150, NEW, torch.float64)
    masked = pair.decoder("full", 20, 150, NEW, torch.float64)
    masked.method = Masked()
    (first, cache), (expected_first, whole) = (decoder.prefill(ids, n) for decoder in (evicting, masked))
    assert torch.equal(first, expected_first)
    for step, token in enumerate(following.T):
        before = [positions_of(layer) for layer in cache.caches]
        found = evicting.decode(token, cache)
        after = [positions_of(layer) for layer in cache.caches]
        now = [length + step for length in lengths]
        # H2O and TOVA drop after they attended, the others before.
        seen = after if policy not in ("h2o", "tova") else [
            [[[*head, now[row]] for head in heads] for row, heads in enumerate(layer)] for layer in before
        ]  # fmt: skip
        masked.method.visible = seen
        torch.testing.assert_close(found, masked.decode(token, whole), rtol=1e-9, atol=1e-9)
        for layer in after:
            for row, heads in enumerate(layer):
                assert all(len(head) == min(20, now[row] + 1) for head in heads)
                recent = {"streaming-llm": 16, "sliding-window": 20, "h2o": 10, "tova": 1}[policy]
                last = list(range(now[row] + 1))[-recent:]
                assert all(head[-recent:] == last for head in heads)
                if policy == "streaming-llm":
                    assert all(head[:4] == list(range(min(4, now[row] + 1))) for head in heads)


def test_positions_in_the_cache_are_those_of_a_shorter_text(family: Callable[..., Any]) -> None:
    """One layer: keys before their rotation depend on their token alone, so evicting is the same as never reading."""
    pair = family("llama", num_hidden_layers=1)
    ids, n, following = prompts(pair, [50], NEW)
    decoder = pair.decoder("streaming-llm", 20, 50, NEW, torch.float64, positions="cache")
    whole = pair.decoder("full", 20, 50, NEW, torch.float64)
    _, cache = decoder.prefill(ids, n)
    text = ids[0].tolist()
    for token in following.T:
        found = decoder.decode(token, cache)
        text += token.tolist()
        left = torch.tensor([text[:4] + text[-16:]])
        expected, _ = whole.prefill(left, torch.tensor([20]))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("policy", [*POLICIES, "streaming-llm ranked"])
def test_within_the_budget_it_is_the_full_cache(
    policy: str, family: Callable[..., Any], teacher_forced: Callable[..., Any]
) -> None:
    pair = family("qwen3")
    ids, n, following = prompts(pair, [14, 3], 6)
    name, _, ranked = policy.partition(" ")
    settings = {"positions": "cache"} if ranked else {}
    full, _ = teacher_forced(pair.decoder("full", 16, 120, 6), ids, n, following)
    found, _ = teacher_forced(pair.decoder(name, 20, 120, 6, **settings), ids, n, following)
    if ranked:
        torch.testing.assert_close(torch.stack(found), torch.stack(full), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(torch.stack(found), torch.stack(full))


def test_recent_tokens_alone_make_h2o_a_window(family: Callable[..., Any]) -> None:
    """With no heavy hitters the same tokens stay; a step sees one more, the one that it drops."""
    pair = family("llama")
    ids, n, following = prompts(pair, [50, 5], NEW)
    heavy, window = pair.decoder("h2o", 20, 50, NEW, recent=20), pair.decoder("sliding-window", 20, 50, NEW)
    (_, ours), (_, theirs) = (decoder.prefill(ids, n) for decoder in (heavy, window))
    for token in following.T:
        for decoder, cache in ((heavy, ours), (window, theirs)):
            decoder.decode(token, cache)
        assert [positions_of(a) for a in ours.caches] == [positions_of(b) for b in theirs.caches]
