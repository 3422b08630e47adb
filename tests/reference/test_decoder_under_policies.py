"""The whole decoder under compression: evicted or unselected tokens count as masked, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt.methods.full import FULL
from kvc_trt.reference import LayerCache, Selection
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.rounding import assert_close

POLICIES = {
    "rocketkv": {"pool_kernel": 5, "window": 8},
    "snapkv++": {"pool_kernel": 5, "window": 8},
    "snapkv-gqa": {"window": 8},
    "hybrid": {},
    "quest": {"skip_layers": 0},
    "quest-matched": {},
    "sparq": {"reallocate": False},
    "keydiff": {},
    "expected-attention": {},
    "expected-attention-hybrid": {},
}
NEW = 6


def prompts(pair: Any, lengths: list[int], steps: int = NEW) -> tuple[Tensor, Tensor, Tensor]:
    """Ids right padded with a token that must not matter, lengths, and the tokens that follow."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, pair.config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    following = torch.randint(0, pair.config.vocab_size, (len(lengths), steps), generator=generator)
    return ids, torch.tensor(lengths), following


class Masked:
    """Full attention with a given mask for each KV head, or query head: a second way to the numbers."""

    def __init__(self) -> None:
        self.visible: list[list[list[list[int]]]] = []
        self.compact = FULL.compact

    def select(self, query: Tensor, cache: LayerCache, _: Any) -> Selection:
        keys, values = cache.keys, cache.values
        output = torch.empty_like(query)
        for b, heads in enumerate(self.visible.pop(0)):
            group = query.shape[1] // len(heads)
            for head, positions in enumerate(heads):
                kv = head * keys.shape[1] // len(heads)
                mask = torch.full((keys.shape[2],), -math.inf, dtype=keys.dtype)
                mask[positions] = 0
                rows = slice(head * group, (head + 1) * group)
                logits = query[b, rows] @ keys[b, kv].T / math.sqrt(query.shape[2]) + mask
                output[b, rows] = torch.softmax(logits, dim=-1) @ values[b, kv]
        return Selection(output)


def visible_positions(layer: LayerCache, prompt_lengths: list[int]) -> list[list[list[int]]]:
    """The logical positions that each row and head of a layer read in the latest step; heads are KV heads, or query
    heads where each of those chooses for itself."""
    kv_heads, lists = layer.keys.shape[1], layer.selected
    heads = kv_heads if lists is None else lists.shape[1]
    result = []
    for b, n in enumerate(prompt_lengths):
        of_row = []
        for head in range(heads):
            kept = [x for x in layer.indices[b, head * kv_heads // heads].tolist() if x >= 0]
            position = kept + [n + i for i in range(int(layer.lengths[b]) - len(kept))]
            slots = range(len(position)) if lists is None else [x for x in lists[b, head].tolist() if x >= 0]
            of_row.append([position[slot] for slot in slots])
        result.append(of_row)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", POLICIES)
def test_compression_equals_masked_full_attention(policy: str, dtype: torch.dtype, family: Callable[..., Any]) -> None:
    """Both sum the same products in another order, which costs a few roundings: up to 11 were seen, by processor."""
    bar = 16 * torch.finfo(dtype).eps
    pair = family("llama3.1")
    lengths = [150, 90, 3]
    ids, n, following = prompts(pair, lengths)
    compressed = pair.decoder(policy, 40, 150, NEW, dtype, **POLICIES[policy])
    masked = pair.decoder("full", 40, 150, NEW, dtype)
    masked.method = Masked()
    first, cache = compressed.prefill(ids, n)
    expected_first, expected_cache = masked.prefill(ids, n)
    assert torch.equal(first, expected_first)  # prefill is dense and exact under every policy
    read = []
    for column in following.T:
        found = compressed.decode(column, cache)
        masked.method.visible = [visible_positions(layer, lengths) for layer in cache.caches]
        read.append(len(masked.method.visible[0][0][0]))
        expected = masked.decode(column, expected_cache)
        assert (found - expected).norm() <= bar * expected.norm()
    assert max(read) < lengths[0]  # something was left out, or this proves nothing
    assert cache.positions.tolist() == [length + NEW for length in lengths]


@pytest.mark.parametrize("policy", ["full", *POLICIES])
def test_a_row_is_the_same_alone_and_in_a_batch(policy: str, family: Callable[..., Any], teacher_forced: Any) -> None:
    pair = family("qwen2")
    lengths = [40, 1, 33, 120]
    ids, n, following = prompts(pair, lengths)
    decoder = pair.decoder(policy, 40, 120, NEW, **POLICIES.get(policy, {}))
    together, cache = teacher_forced(decoder, ids, n, following)
    for b, length in enumerate(lengths):
        alone, own = teacher_forced(decoder, ids[b : b + 1, :length], n[b : b + 1], following[b : b + 1])
        assert_close(torch.stack([x[b] for x in together]), torch.cat(alone))
        for left, right in zip(cache.caches, own.caches, strict=True):
            assert left.lengths[b] == right.lengths[0]
            width = right.indices.shape[2]
            assert torch.equal(left.indices[b, :, :width], right.indices[0])
            assert (left.indices[b, :, width:] == -1).all()
            if left.selected is not None and right.selected is not None:
                assert torch.equal(left.selected[b], right.selected[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[30, 7], [1]])
def test_within_the_budget_it_is_the_full_cache_bit_for_bit(
    policy: str, lengths: list[int], family: Callable[..., Any], teacher_forced: Any
) -> None:
    pair = family("qwen3")
    ids, n, following = prompts(pair, lengths)
    budget = {"snapkv-gqa": 120 + NEW}.get(policy, 60)
    full_logits, _ = teacher_forced(pair.decoder("full", 16, 120, NEW), ids, n, following)
    found, _ = teacher_forced(pair.decoder(policy, budget, 120, NEW, **POLICIES[policy]), ids, n, following)
    assert torch.equal(torch.stack(found), torch.stack(full_logits))


@pytest.mark.parametrize("n", [5, 8, 48, 49])
def test_prompts_around_window_and_budget_have_the_expected_lengths(n: int, family: Callable[..., Any]) -> None:
    pair = family("llama")
    decoder = pair.decoder("rocketkv", 40, 120, NEW, window=8, pool_kernel=5, prompt_budget=48)
    ids, lengths, following = prompts(pair, [n])
    _, cache = decoder.prefill(ids, lengths)
    assert cache.caches[0].lengths.tolist() == [min(n, 48)]
    for column in following.T:
        decoder.decode(column, cache)
    assert cache.caches[2].lengths.tolist() == [min(n, 48) + NEW]
    assert cache.caches[2].capacity == 48 + NEW


def test_rows_of_1_and_4000_tokens_share_a_batch(family: Callable[..., Any]) -> None:
    pair = family("mistral", num_hidden_layers=1)
    decoder = pair.decoder("rocketkv", 64, 4000, 8)
    ids, lengths, following = prompts(pair, [1, 4000], 2)
    _, cache = decoder.prefill(ids, lengths)
    assert cache.caches[0].lengths.tolist() == [1, decoder.parameters.prompt_budget]
    for column in following.T:
        assert torch.isfinite(decoder.decode(column, cache)).all()
    selected = cache.caches[0].selected
    assert selected is not None
    assert (selected >= 0).sum(dim=-1).tolist() == [[3, 3], [32, 32]]


def test_skipped_layers_keep_everything(family: Callable[..., Any]) -> None:
    pair = family("longchat")
    decoder = pair.decoder("rocketkv", 40, 150, NEW, window=8, pool_kernel=5, skip_layers=2)
    ids, lengths, following = prompts(pair, [150])
    _, cache = decoder.prefill(ids, lengths)
    decoder.decode(following[:, 0], cache)
    assert [layer.capacity for layer in cache.caches] == [156, 156, decoder.parameters.capacity]
    assert [layer.lengths.item() for layer in cache.caches] == [151, 151, decoder.parameters.prompt_budget + 1]
    assert [layer.selected is None for layer in cache.caches] == [True, True, False]
    assert [layer.page_min is None for layer in cache.caches] == [True, True, False]


def test_weights_that_are_not_kept_give_the_same_numbers(family: Callable[..., Any], teacher_forced: Any) -> None:
    for name in ("llama", "llama-tied-biased"):
        pair = family(name)
        ids, lengths, following = prompts(pair, [30, 9])
        kept, _ = teacher_forced(pair.decoder("full", 16, 30, NEW), ids, lengths, following)
        reads = pair.weights.reads
        decoder: ReferenceDecoder = pair.decoder("full", 16, 30, NEW, resident=False)
        found, _ = teacher_forced(decoder, ids, lengths, following)
        torch.testing.assert_close(torch.stack(found), torch.stack(kept), rtol=1e-6, atol=1e-6)
        assert pair.weights.reads - reads > 3 * NEW * 9
        assert not any(isinstance(value, Tensor) for value in vars(decoder).values())


def test_a_full_cache_is_an_error_and_changes_nothing(family: Callable[..., Any]) -> None:
    decoder = family("llama").decoder("full", 16, 10, 2)
    _, cache = decoder.prefill(torch.ones(1, 10, dtype=torch.int64), torch.tensor([10]))
    for _ in range(2):
        decoder.decode(torch.tensor([3]), cache)
    before = [layer.keys.clone() for layer in cache.caches]
    with pytest.raises(ValueError, match=r"cache.lengths has shape \[1\] with values \[12\]; expected each in 0..11"):
        decoder.decode(torch.tensor([3]), cache)
    assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.caches, before, strict=True))


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        (torch.ones(1, 11), [11], r"prompt_lengths .*\[11\]; expected each in 1..10"),
        (torch.ones(1, 4), [0], r"expected each in 1..4"),
        (torch.ones(4), [4], r"input_ids has shape \[4\]; expected \[B,S\]"),
    ],
)
def test_invalid_prompts_are_refused_by_name(
    ids: Tensor, lengths: list[int], message: str, family: Callable[..., Any]
) -> None:
    decoder = family("llama").decoder("full", 16, 10, 2)
    with pytest.raises(ValueError, match=message):
        decoder.prefill(ids.long(), torch.tensor(lengths))
