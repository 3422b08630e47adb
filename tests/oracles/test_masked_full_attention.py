"""Logits under every policy against transformers, attending to everything it may see: what was evicted or not read is
hidden from it by a mask per layer, head and step. A mask saves no work; here it gives the expected answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt import policies
from kvc_trt.reference.cache import LayerCache, Selection

NEW, LENGTHS, BUDGET = 7, (150, 110, 20), 40
SMALL = {"window": 8, "pool_kernel": 5}


class Watched:
    """A method that remembers which positions each call read: boolean [B,heads,positions], one per call."""

    def __init__(self, method: Any, length: int) -> None:
        self.compact, self._method, self._length = method.compact, method, length
        self.read: list[Tensor] = []

    def select(self, query: Tensor, cache: LayerCache, parameters: Any) -> Selection:
        step: Selection = self._method.select(query, cache, parameters)
        assert cache.positions is not None
        slots = torch.arange(cache.capacity).expand(*cache.positions.shape)
        visible = slots < cache.lengths[:, None, None]
        if step.selected is not None:
            selected = step.selected.long()
            visible = torch.zeros(*selected.shape[:2], cache.capacity + 1, dtype=torch.bool)
            visible = visible.scatter(2, selected.where(selected >= 0, cache.capacity), True)[..., :-1]
        per_head = query.shape[1] // visible.shape[1], query.shape[1] // cache.positions.shape[1]
        visible = visible.repeat_interleave(per_head[0], dim=1)
        positions = cache.positions.repeat_interleave(per_head[1], dim=1).where(visible, self._length)
        read = torch.zeros(*positions.shape[:2], self._length + 1, dtype=torch.bool).scatter(2, positions, True)
        self.read.append(read[..., :-1])
        return step


def masked_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    visible: Tensor, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' interface: query [1,H,T,D], key and value [1,G,T,D] -> [1,T,H,D]; visible [layers,H,T,T]."""
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    logits = (query @ keys.transpose(2, 3) * scaling).masked_fill(~visible[module.layer_idx], -torch.inf)
    return (torch.softmax(logits, dim=-1) @ values).transpose(1, 2), None


@pytest.fixture(autouse=True)
def _interface() -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register("masked-by-a-test", masked_attention)
    yield
    AttentionInterface._global_mapping.pop("masked-by-a-test")


def variants() -> dict[str, dict[str, Any]]:
    """Settings under which each policy leaves something out; several of them for those that may have several caches."""
    plain = {one.name: policies.applicable(one.name, SMALL) for one in policies.describe() if one.name != "full"}
    return plain | {
        "quest": {"page_size": 8, "skip_layers": 0},
        "sparq": {"reallocate": False},  # the mean of what was not read is no attention to it
        "rocketkv skipping a layer": {**SMALL, "skip_layers": 1},
        "rocketkv by layers": {**SMALL, "layer_budget": "squeeze", "layer_budgets": (20, 90, 40)},
        "rocketkv by prompts": {**SMALL, "layer_budget": "squeeze-online"},
        "h2o by layers": {"layer_budget": "squeeze", "layer_budgets": (12, 60, 30)},
        "streaming-llm by layers": {"layer_budget": "squeeze", "layer_budgets": (12, 60, 30)},
        "duo-attention with retrieval heads": {"token_budget": 80, "sinks": 8, "recent": 16},
    }


def read_by_layer(read: list[Tensor], parameters: Any, heads: int, kv_heads: int, layers: int) -> Tensor:
    """One step's masks as [layers,B,H,positions]; heads that keep everything see everything."""
    rest = iter(read)
    result = torch.ones(layers, *(len(LENGTHS), heads, read[0].shape[2]), dtype=torch.bool)
    for layer in range(layers):
        for group in parameters.groups(layer):
            mine = range(kv_heads) if group.kv_heads is None else group.kv_heads
            size = heads // kv_heads
            if group.parameters.compresses:
                result[layer, :, [kv * size + head for kv in mine for head in range(size)]] = next(rest)
    return result


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("name", ["llama3.1", "longchat"])
def test_logits_equal_masked_full_attention(
    name: str, variant: str, family: Callable[..., Any], exact: Callable[[Any], Any]
) -> None:
    pair = family(name)
    model = exact(pair)
    model.config._attn_implementation = "masked-by-a-test"
    config, total = pair.config, max(LENGTHS) + NEW
    ids = torch.randint(0, config.vocab_size, (len(LENGTHS), total), generator=torch.Generator().manual_seed(11))
    policy, settings = variant.partition(" ")[0], variants()[variant]
    if "retrieval" in variant:
        heads = config.num_key_value_heads
        settings["head_scores"] = [[(layer + 2 * head) % 5 / 5 for head in range(heads)] for layer in range(3)]
    budget = settings.pop("token_budget", BUDGET)
    decoder = pair.decoder(policy, budget, max(LENGTHS), NEW, torch.float64, **settings)
    decoder.method = watched = Watched(decoder.method, total)
    shape = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers

    first, cache = decoder.prefill(ids[:, : max(LENGTHS)], torch.tensor(LENGTHS))
    found, seen = [first], []
    for step in range(NEW):
        found.append(decoder.decode(torch.stack([row[n + step] for row, n in zip(ids, LENGTHS, strict=True)]), cache))
        seen.append(read_by_layer(watched.read, decoder.parameters, *shape))
        watched.read = []
    assert cache.positions.tolist() == [n + NEW for n in LENGTHS]

    for b, n in enumerate(LENGTHS):
        visible = torch.ones(n + NEW, n + NEW).tril().bool().repeat(shape[2], shape[0], 1, 1)
        for step, masks in enumerate(seen):
            visible[:, :, n + step] &= masks[:, b, :, : n + NEW]
        assert n < BUDGET or not visible[-1, :, -1].all()  # something was left out, or this proves nothing
        with torch.inference_mode():
            expected = model(ids[b, None, : n + NEW], visible=visible).logits[0, n - 1 :]
        torch.testing.assert_close(torch.stack([logits[b] for logits in found]), expected, rtol=1e-9, atol=1e-9)
