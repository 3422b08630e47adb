"""The watched model: what it shows is what the reference computes."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.studies.watched import Recent, WatchedDecoder
from kvc_trt import policies
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.small_model import SMALL

LONGEST = 64
TEXT = torch.randint(2, SMALL.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
FOLLOWING = TEXT[:9]


@pytest.fixture(scope="module")
def weights():
    return RandomWeights(SMALL, 0)


@pytest.fixture(scope="module")
def watched(weights):
    return WatchedDecoder.of(SMALL, weights, LONGEST)


def test_attention_of_a_window_is_softmax_over_all_that_a_query_sees(watched):
    layers = []
    watched.watch(TEXT, layers.append)
    assert [one.index for one in layers] == list(range(SMALL.num_hidden_layers))
    layer = layers[1]
    found = layer.attention(30, 33, 32)
    assert found.shape == (SMALL.num_attention_heads, 3, 32)
    head, row = 3, 1
    query = layer.query[head, 30 + row]
    scores = [math.exp(float(query @ layer.keys[head // 2, at]) / 4) for at in range(30 + row + 1)]
    assert found[head, row].tolist() == pytest.approx([one / sum(scores) for one in scores], abs=1e-6)
    assert torch.equal(found[:, 0, 31], torch.zeros(SMALL.num_attention_heads))
    assert layer.attention(0, 2, 8)[..., 2:].count_nonzero() == 0


def test_cosines_of_single_tokens_have_the_reference_s_mean(watched):
    found = []
    watched.watch(TEXT, lambda layer: found.append(torch.cosine_similarity(layer.before, layer.after, dim=-1).mean()))
    expected = watched.layer_cosines(torch.tensor([TEXT]), torch.tensor([len(TEXT)]))[:, 0]
    torch.testing.assert_close(torch.stack(found), expected)


@pytest.mark.parametrize(("policy", "sinks"), [("sliding-window", 0), ("streaming-llm", 4)])
def test_text_behind_a_divided_cache_has_the_logits_of_the_policy(watched, weights, policy, sinks):
    divisions = [(6, 25, 17), (16, 16, 16), (LONGEST, 5, 30)]
    found = watched.along(TEXT, FOLLOWING, Recent(divisions, sinks))
    for kept, logits in zip(divisions, found, strict=True):
        rule = policies.resolve(
            policy, model=SMALL, token_budget=max(16, sum(kept) // 3), max_input_len=LONGEST - 16, max_output_len=16,
            layer_budget="squeeze", layer_budgets=list(kept),
        )  # fmt: skip
        decoder = ReferenceDecoder(SMALL, weights, method=policies.method(rule), parameters=rule)
        first, cache = decoder.prefill(torch.tensor([TEXT]), torch.tensor([len(TEXT)]))
        steps = [decoder.decode(torch.tensor([token]), cache) for token in FOLLOWING[:-1]]
        torch.testing.assert_close(logits, torch.cat([first, *steps]), atol=1e-5, rtol=1e-5)
