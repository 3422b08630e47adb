"""kvpress's presses on one prompt, as `benchmarks.accuracy.kvpress.answers` asks them: one prefill for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.accuracy.kvpress.rows import Layers, Rows

SCORERS = {
    "snapkv": "SnapKVPress",
    "streaming-llm": "StreamingLLMPress",
    "expected-attention": "ExpectedAttentionPress",
    "knorm": "KnormPress",
    "tova": "TOVAPress",
}
"""kvpress's classes, each with its defaults."""
SCORED_BY_AMOUNT = ("streaming-llm",)
"""Presses whose scores depend on how much is kept; those of the others are computed once per layer."""
ADAKV = "adakv-snapkv"


def ratio_for(kept: int, length: int) -> float:
    """Return the compression ratio at which kvpress keeps `kept` tokens: it rounds down."""
    return max(0.0, 1 - (kept + 0.5) / length)


class Compressor:
    """kvpress's presses on the caches of one prompt: every press's own `compress`, on a layer's full cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        import kvpress

        self._modules = [layer.self_attn for layer in model.model.layers]
        self._presses = {name: getattr(kvpress, press)() for name, press in SCORERS.items()}
        self._scores: dict[tuple[str, int], torch.Tensor] = {}
        for press in self._presses.values():
            press.post_init_from_model(model)
        for module in self._modules:
            module.rotary_emb = model.model.rotary_emb

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Within it, a prefill leaves the scores that each press gives to each layer's tokens."""

        def behind_attention(module: Any, _: Any, kwargs: Any, output: Any) -> None:
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            for name, press in self._presses.items():
                if name not in SCORED_BY_AMOUNT:
                    score = type(press).score
                    found = score(press, module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs)
                    self._scores[name, module.layer_idx] = found

        hooks = [module.register_forward_hook(behind_attention, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def scorers(self, full: Layers, amount: int, room: int) -> Rows:
        """Return a row for each scoring press: the tokens that it keeps of the full cache, and room for `room` more."""
        rows = Rows.empty([(name, amount) for name in SCORERS], amount, room, full)
        for layer, (keys, values) in enumerate(full):
            for row, name in enumerate(SCORERS):
                press = self._ready(name, layer, amount, keys.shape[2])
                rows.fill(row, layer, *press.compress(self._modules[layer], None, keys, values, None, {}))
        return rows

    def masked(self, full: Layers, amount: int, room: int) -> Rows:
        """Return the full cache and AdaKV's masks of it; masked keys are overwritten in place."""
        import kvpress

        rows = whole_rows((ADAKV, amount), full, room)
        masks = []
        for layer, (keys, values) in enumerate(full):
            module = self._modules[layer]
            press = kvpress.AdaKVPress(self._ready("snapkv", layer, amount, keys.shape[2]))
            press.compress(module, None, keys, values, None, {})
            masks.append(module.masked_key_indices)
            module.masked_key_indices = None
        return replace(rows, masks=masks)

    def _ready(self, name: str, layer: int, amount: int, length: int) -> Any:
        """Return a press that keeps as many tokens, with the scores that it gave to a layer."""
        press = self._presses[name]
        press.compression_ratio = ratio_for(amount, length)
        if name not in SCORED_BY_AMOUNT:
            press.score = lambda *_, **__: self._scores[name, layer].clone()
        return press


def whole_rows(name: tuple[str, int], full: Layers, room: int) -> Rows:
    """Return a row with the whole cache."""
    rows = Rows.empty([name], full[0][0].shape[2], room, full)
    for layer, (keys, values) in enumerate(full):
        rows.fill(0, layer, keys, values)
    return rows
