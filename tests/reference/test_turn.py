"""The reference's turns: block attention, joining, appending and compaction, against one-token forms and `compact`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference

G, D = 2, 8


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


rows = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(rows, st.integers(0, 10_000))
def test_each_token_attends_as_a_step_would(lengths, seed):
    stored, new = (torch.tensor(column) for column in zip(*lengths, strict=True))
    keys, values = (draw(seed + i, len(stored), G, int((stored + new).max()), D) for i in range(2))
    queries = draw(seed + 2, len(stored), 2 * G, int(new.max()), D)
    found = reference.extend_attention(queries, keys, values, stored, new)
    for b, (m, n) in enumerate(lengths):
        for i in range(n):
            count = torch.tensor([m + i + 1])
            step = reference.dense_attention(queries[b, :, i][None], keys[b][None], values[b][None], count)
            torch.testing.assert_close(found[b, :, i], step[0])
        assert not found[b, :, n:].any()


def test_a_row_with_more_entries_than_the_cache_is_refused():
    lengths, new = torch.tensor([11, 3]), torch.tensor([1, 10])
    keys = draw(0, 2, G, 12, D)
    with pytest.raises(ValueError, match="row 1 has 3 stored and 10 new entries; expected at most 12 in all"):
        reference.extend_attention(draw(1, 2, 2 * G, 10, D), keys, keys, lengths, new)


@settings(max_examples=25, deadline=None)
@given(rows, st.integers(1, 5), st.integers(0, 10_000))
def test_a_block_is_appended_as_its_tokens_one_by_one(lengths, page_size, seed):
    stored, new = (torch.tensor(column) for column in zip(*lengths, strict=True))
    batch, block = len(stored), int(new.max())
    keys, values = (draw(seed + i, batch, G, 33, D) for i in range(2))
    bounds = reference.page_bounds(keys, stored, page_size)
    k_new, v_new = (draw(seed + 2 + i, batch, G, block, D) for i in range(2))
    found = [table.clone() for table in (keys, values, *bounds)]
    reference.append_block(*found, stored, k_new, v_new, new, page_size=page_size)
    for b, n in enumerate(new.tolist()):
        one = [table[b : b + 1] for table in (keys, values, *bounds)]
        for i in range(n):
            place = stored[b : b + 1] + i
            entry = k_new[b : b + 1, :, i], v_new[b : b + 1, :, i]
            one = list(reference.append(*one, place, *entry, page_size=page_size))
        for ours, theirs in zip(found, one, strict=True):
            torch.testing.assert_close(ours[b : b + 1], theirs, rtol=0, atol=0)


@settings(max_examples=25, deadline=None)
@given(rows, st.integers(1, 6), st.integers(0, 10_000))
def test_compaction_is_that_of_one_prompt_by_the_turns_own_window(lengths, window, seed):
    stored, new = (torch.tensor(column) for column in zip(*lengths, strict=True))
    batch, block = len(stored), int(new.max())
    keys, values = (draw(seed + i, batch, G, 20, D) for i in range(2))
    k_new, v_new = (draw(seed + 2 + i, batch, G, block, D) for i in range(2))
    queries = draw(seed + 4, batch, 2 * G, block, D)
    both = reference.join(keys, values, stored, k_new, v_new, new)
    window = min(window, block)
    found = reference.compact_turn(queries[:, :, -window:], *both, new, prompt_budget=8, pool_kernel=3)
    for b, (m, n) in enumerate(lengths):
        own = min(window, n)
        alone = torch.cat([keys[b, :, :m], k_new[b, :, :n]], dim=1)[None]
        expected = reference.compact(
            queries[b : b + 1, :, -own:], alone, alone, torch.tensor([m + n]), prompt_budget=8, pool_kernel=3
        )
        width = expected.indices.shape[2]
        torch.testing.assert_close(found.indices[b : b + 1, :, :width], expected.indices)
        torch.testing.assert_close(found.keys[b : b + 1, :, :width], expected.keys)
        assert found.lengths[b] == min(m + n, 8)
        if m + n > 8:
            assert (found.indices[b, :, -own:] == torch.arange(m + n - own, m + n)).all()


def test_heavy_hitters_add_a_turns_attention_to_what_was_paid_before():
    """A prompt in two parts receives the same attention as the whole prompt."""
    queries, keys, values = draw(0, 1, 2 * G, 30, D), draw(1, 1, G, 30, D), draw(2, 1, G, 30, D)
    whole = reference.keep_heavy_hitters(queries, keys, values, torch.tensor([30]), heavy=40, recent=1)
    lengths = torch.tensor([20])
    first = reference.keep_heavy_hitters(
        queries[:, :, :20], keys[:, :, :20], values[:, :, :20], lengths, heavy=40, recent=1
    )
    paid = torch.cat([first.scores, torch.zeros(1, G, 10, dtype=torch.float64)], dim=2)
    both = reference.keep_heavy_hitters_of_turn(
        queries[:, :, 20:], keys, values, torch.tensor([30]), torch.tensor([10]), paid, heavy=40, recent=1
    )
    torch.testing.assert_close(both.scores, whole.scores)
    kept = reference.keep_heavy_hitters_of_turn(
        queries[:, :, 20:], keys, values, torch.tensor([30]), torch.tensor([10]), paid, heavy=5, recent=3
    )
    at_once = reference.keep_heavy_hitters(queries, keys, values, torch.tensor([30]), heavy=5, recent=3)
    torch.testing.assert_close(kept.indices, at_once.indices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_lengths": torch.tensor([0])}, "new_lengths .* expected each in 1..4"),
        ({"lengths": torch.tensor([11])}, "lengths .* expected each in 0..10"),
        ({"k_new": torch.zeros(1, 1, 4, D, dtype=torch.float64)}, "k_new has shape"),
        ({"lengths": torch.tensor([8])}, "row 0 stores 8 tokens and gets 4; expected at most 10 in all"),
    ],
)
def test_mismatched_turn_tensors_are_refused(change, message):
    tables = {name: torch.zeros(1, G, slots, D, dtype=torch.float64) for name, slots in (("keys", 10), ("k_new", 4))}
    given = {**tables, "lengths": torch.tensor([2]), "new_lengths": torch.tensor([4]), **change}
    with pytest.raises(ValueError, match=message):
        reference.append_block(
            given["keys"], given["keys"].clone(), None, None, given["lengths"], given["k_new"],
            tables["k_new"].clone(), given["new_lengths"], page_size=1,
        )  # fmt: skip
