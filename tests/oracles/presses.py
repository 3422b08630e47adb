"""kvpress's presses, without the rest of kvpress, and the tokens that each of them keeps of a prompt."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor


def import_presses() -> None:
    """An empty package `kvpress` whose submodules are the installed ones; the test module is skipped without them.

    Its own __init__ imports data sets, downloads and a command line that no press needs, and wraps every attention
    function of transformers for the whole process: other tests would run on patched models.
    """
    spec = importlib.util.find_spec("kvpress")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("kvpress is not installed (pip install --no-deps kvpress==0.5.5)", allow_module_level=True)
    package = ModuleType("kvpress")
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules.setdefault("kvpress", package)


class Kept(NamedTuple):
    """The part of one layer's cache that a press kept."""

    positions: Tensor
    """int64 [G,k], ascending, found by comparing the keys that stayed with all keys."""
    scores: Tensor
    """[G,n]: the scores that the press ranked."""


class Pressed(NamedTuple):
    """A prompt that transformers' model has read under a press."""

    layers: list[Kept]
    cache: Any


def press_prompt(press: Any, model: Any, ids: Tensor) -> Pressed:
    """Run transformers' model over one prompt [n] under a press.

    The presses leave the order of equal scores to torch.topk; here they rank (score descending, index ascending).
    """
    found: list[Kept] = []
    score, compress = press.score, press.compress

    def ranks(*arguments: Any) -> Tensor:
        press.seen = score(*arguments)
        order = torch.sort(press.seen, dim=-1, descending=True, stable=True).indices
        return -order.argsort(dim=-1)

    def recording(module: Any, hidden: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        kept = compress(module, hidden, keys, *rest)
        same = (kept[0][0, :, :, None] == keys[0, :, None]).all(dim=-1)
        assert (same.sum(dim=-1) == 1).all()
        found.append(Kept(same.int().argmax(dim=-1).sort(dim=-1).values, press.seen[0]))
        return kept

    press.score, press.compress = ranks, recording
    return Pressed(found, read(press, model, ids))


def read(press: Any, model: Any, ids: Tensor) -> Any:
    """transformers' cache of a prompt [n], without the tokens that the press dropped."""
    from transformers import DynamicCache

    length, cache = len(ids), DynamicCache()
    with torch.inference_mode(), press(model):
        # Each layer's hook asks for the position, which transformers itself no longer hands down.
        model(
            ids[None], past_key_values=cache, attention_mask=torch.ones(1, length, dtype=torch.int64),
            cache_position=torch.arange(length),
        )  # fmt: skip
    return cache


def answer(model: Any, cache: Any, start: int, following: Tensor) -> Tensor:
    """Logits [steps,vocab] after each of `following` [steps], whose positions count from `start` whatever is cached."""
    logits = []
    with torch.inference_mode():
        for step, token in enumerate(following):
            # Without a mask, transformers would take the jump in the positions for the start of another sequence.
            mask = torch.ones(1, cache.get_seq_length() + 1, dtype=torch.int64)
            position = torch.tensor([[start + step]])
            logits.append(
                model(token[None, None], past_key_values=cache, position_ids=position, attention_mask=mask).logits[0, 0]
            )
    return torch.stack(logits)


def ratio(budget: int, length: int) -> float:
    """Return the compression ratio at which int(length * (1 - ratio)) is the budget, whatever the rounding."""
    return 1 - (budget + 0.5) / length


def assert_same_sets(found: Tensor, press: Kept, bar: float = 1e-5) -> None:
    """Positions [G,k] equal to the press's, near-ties excepted: what differs was scored within `bar` of the cut."""
    assert found.shape == press.positions.shape
    for ours, theirs, scores in zip(found.tolist(), press.positions.tolist(), press.scores, strict=True):
        cut = min(float(scores[j]) for j in theirs)
        for position in set(ours) ^ set(theirs):
            assert abs(float(scores[position]) - cut) <= bar * abs(cut), (position, ours, theirs)
