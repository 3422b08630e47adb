"""What is left of a prompt under the policies that go on evicting, against kvpress's presses on transformers' model."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt.policies import heavy_hitters
from kvc_trt.reference.heavy_hitters import received_in_prompt
from kvc_trt.reference.selection import best_ascending
from tests.oracles.presses import import_presses, press_prompt, ratio
from tests.oracles.test_kvpress import check, kept_by_policy, pair, prompt

import_presses()

from kvpress.presses.observed_attention_press import ObservedAttentionPress  # noqa: E402
from kvpress.presses.streaming_llm_press import StreamingLLMPress  # noqa: E402

__all__ = ["pair"]
LENGTHS = [(150, 48), (90, 89)]


@dataclass
class HeavyHitterPress(ObservedAttentionPress):  # type: ignore[misc]
    """H2O in the press's terms: not divided by the queries that see a token, and the last half is safe."""

    recent: int = 0

    def score(self, module: Any, hidden: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        averages: Tensor = super().score(module, hidden, keys, *rest)
        received = averages * torch.arange(keys.shape[2], 0, -1)
        received[..., keys.shape[2] - self.recent :] = torch.inf
        return received


@pytest.mark.parametrize(("n", "budget", "sinks"), [(150, 48, 4), (90, 89, 0)])
def test_streaming_llm(pair: Any, n: int, budget: int, sinks: int) -> None:
    ids = prompt(pair, n, n)
    expected = press_prompt(StreamingLLMPress(ratio(budget, n), sinks), pair.hugging_face, ids).layers
    check(kept_by_policy(pair, "streaming-llm", budget, ids, sinks=sinks), expected)


@pytest.mark.parametrize(("n", "budget"), LENGTHS)
def test_h2o(pair: Any, n: int, budget: int) -> None:
    ids, recent = prompt(pair, n, n), budget - budget // 2
    pair.hugging_face.set_attn_implementation("eager")
    expected = press_prompt(HeavyHitterPress(ratio(budget, n), recent), pair.hugging_face, ids).layers
    check(kept_by_policy(pair, "h2o", budget, ids), expected)


def test_observed_attention_as_it_comes(pair: Any) -> None:
    """Our sums divided by the queries that see a token, with no token safe, keep the press's set."""
    n, budget = 150, 48
    ids, seen = prompt(pair, n, n), []

    def recorded(queries: Tensor, keys: Tensor, *rest: Any) -> Any:
        seen.append((queries[0], keys[0]))
        return heavy_hitters.compact(queries, keys, *rest)

    decoder = pair.decoder("h2o", budget, n, 4)
    decoder.method = SimpleNamespace(compact=recorded)
    decoder.prefill(ids[None], torch.tensor([n]))
    averages = [received_in_prompt(*each) / torch.arange(n, 0, -1) for each in seen]
    pair.hugging_face.set_attn_implementation("eager")
    expected = press_prompt(ObservedAttentionPress(ratio(budget, n)), pair.hugging_face, ids).layers
    check([best_ascending(each, budget) for each in averages], expected)
