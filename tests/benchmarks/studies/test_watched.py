"""The watched model: what it shows is what the reference computes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.studies.watched import Branch, Recent, Sampling, WatchedDecoder
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


def test_answers_come_with_the_attention_of_prompt_and_answer_read_at_once(study_model):
    prompts = [study_model.tokenizer.encode(text) for text in ("The door is blue. Which", "A")]
    answered = study_model.answers(prompts, Sampling(6, at_least=6), seed=0)
    for prompt, one in zip(prompts, answered, strict=True):
        layers = []
        study_model.decoder.watch([*prompt, *one.tokens], layers.append)
        assert len(one.tokens) == 6
        assert len(one.layers) == len(layers)
        for found, expected in zip(one.layers, layers, strict=True):
            torch.testing.assert_close(found.query, expected.query, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.keys, expected.keys, atol=1e-4, rtol=1e-4)


def test_an_answer_that_ends_early_has_no_later_tokens_in_its_attention(study_model, monkeypatch):
    prompts = [study_model.tokenizer.encode(text) for text in ("The door is blue. Which", "A")]
    long = study_model.answers(prompts, Sampling(6, at_least=6), seed=0)
    end = long[0].tokens[2]
    assert end not in long[0].tokens[:2]
    config = dataclasses.replace(study_model.decoder.config, eos_token_ids=(end,))
    monkeypatch.setattr(study_model.decoder, "config", config)
    short = study_model.answers(prompts, Sampling(6), seed=0)
    assert short[0].tokens == long[0].tokens[:2]
    assert [one.query.shape[1] for one in short[0].layers] == [len(prompts[0]) + 2] * len(short[0].layers)


def test_the_last_logits_alone_are_those_of_all(watched):
    (every,) = watched.branches(TEXT, [Branch(30, FOLLOWING, Recent([(9, 9, 9), (12, 12, 12)], 2))])
    (last,) = watched.branches(TEXT, [Branch(30, FOLLOWING, Recent([(9, 9, 9), (12, 12, 12)], 2), wanted=3)])
    for one, other in zip(every, last, strict=True):
        torch.testing.assert_close(one[-3:], other, atol=1e-5, rtol=1e-5)
