"""Tokens drawn on the device: the host's sampler draws the same ones from the same logits and random numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.model.capturer import Capturer
from kvc_trt.backends.torch.model.drawing import (
    CHANGES,
    DeviceDrawRules,
    DrawVariant,
    StaticDrawing,
    adjusted,
    drawn_tokens,
    unpacked,
)
from kvc_trt.backends.torch.model.step import StaticStep
from kvc_trt.kernels.switches import DEVICE_SAMPLING
from kvc_trt.runtime import Request, Sampling, Session, Speculation
from kvc_trt.runtime.executor import NO_DRAW, NONE_ALLOWED, NOT_FINITE, DrawingExecutor
from kvc_trt.runtime.logprobs import token_logprobs
from kvc_trt.runtime.sampling.banned import Banned
from kvc_trt.runtime.sampling.sampler import Sampler, candidates
from tests.backends.torch import meta
from tests.runtime.test_speculation import Always

CPU = torch.device("cpu")
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.sampled_from([1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    seed=st.integers(0, 2**32),
)


@st.composite
def samplers(draw, vocab: int) -> Sampler:
    """Return a sampler in the middle of an answer."""
    tokens = st.integers(0, vocab - 1)
    banned = Banned([(token,) for token in draw(st.sets(tokens, max_size=min(3, vocab - 1)))])
    biases = draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3))
    sampler = Sampler(draw(SAMPLINGS), banned, biases)
    sampler.read(draw(st.lists(tokens, max_size=5)))
    for _ in range(draw(st.integers(0, 3))):
        sampler.read([sampler.choose(np.zeros(vocab, np.float32))])
    return sampler


def logits_of(seed: int, draws: int, vocab: int, *, coarse: bool) -> np.ndarray:
    """Normal logits; coarse ones have many ties."""
    found = np.random.default_rng(seed).normal(0, 3, (draws, vocab)).astype(np.float32)
    return np.round(found) if coarse else found


def drawn(logits: np.ndarray, rules) -> list:
    return StaticDrawing(torch.from_numpy(logits), Capturer(CPU)).run(rules)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 70), st.integers(0, 2**32), st.booleans())
def test_a_batch_draws_what_each_rows_sampler_draws_on_the_host(data, vocab, seed, coarse):
    rows = [data.draw(samplers(vocab)) for _ in range(data.draw(st.integers(1, 4)))]
    wanted = [data.draw(st.sampled_from([None, 0, 4])) for _ in rows]
    logits = logits_of(seed, len(rows), vocab, coarse=coarse)
    rules = [row.rules(vocab, count) for row, count in zip(rows, wanted, strict=True)]
    for row, own, found, count in zip(rows, logits, drawn(logits, rules), wanted, strict=True):
        assert found.token == row.choose(own)
        if count is None:
            assert found.logprobs is None
            continue
        expected = token_logprobs(own, found.token, count)
        assert [token for token, _ in found.logprobs.top] == [token for token, _ in expected.top]
        assert found.logprobs.logprob == pytest.approx(expected.logprob, abs=1e-12)
        values = zip(found.logprobs.top, expected.top, strict=True)
        assert all(ours[1] == pytest.approx(theirs[1], abs=1e-12) for ours, theirs in values)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(2, 40), st.integers(0, 2**32), st.booleans())
def test_the_tokens_that_can_be_drawn_are_the_hosts(data, vocab, seed, coarse):
    """Random numbers across [0, 1) reach every candidate and nothing else; adjusted logits have the host's bits."""
    row = data.draw(samplers(vocab))
    (logits,) = logits_of(seed, 1, vocab, coarse=coarse)
    rule = row.rules(vocab)
    rows = DeviceDrawRules(1, vocab, CPU)
    rows.fill([rule])
    read, allowed = (unpacked(words, vocab) for words in rows.words)
    scores = adjusted(torch.from_numpy(logits)[None], rows, read, allowed)[0].numpy()
    assert (scores == row._adjusted(logits)).all()
    if rule.temperature == 0.0:
        return
    ids, probabilities = candidates(scores, row._sampling)
    ends = np.cumsum(probabilities) / probabilities.sum()
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2  # of each candidate's part of [0, 1)
    reached = np.flatnonzero(np.diff(np.concatenate([[0.0], ends])) > 1e-12)
    uniforms = [*middles[reached], 0.0, np.nextafter(1.0, 0.0)]
    found = [one.token for one in drawn(np.repeat(logits[None], len(uniforms), axis=0),
                                        [replace(rule, uniform=float(u)) for u in uniforms])]  # fmt: skip
    assert found[:-2] == ids[reached].tolist()
    assert set(found) <= set(ids.tolist())


def test_draws_follow_the_probabilities():
    """Chi-square over 20,000 draws with a fixed seed: counts as far off as these come once in 10,000 runs or more."""
    logits = logits_of(3, 1, 30, coarse=False)[0]
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.95, min_p=0.01, seed=11)
    ids, probabilities = candidates(logits, sampling)
    random, count = np.random.default_rng(7), 20_000
    rule = Sampler(sampling).rules(len(logits))
    tokens: list[int] = []
    for _ in range(4):
        rules = [replace(rule, uniform=float(u)) for u in random.random(count // 4)]
        tokens += [one.token for one in drawn(np.repeat(logits[None], len(rules), axis=0), rules)]
    expected = probabilities / probabilities.sum() * count
    observed = np.array([tokens.count(token) for token in ids])
    assert observed.sum() == count, "a token was drawn that is no candidate"
    distance = torch.tensor(((observed - expected) ** 2 / expected).sum())
    assert torch.special.gammaincc(torch.tensor((len(ids) - 1) / 2, dtype=torch.float64), distance / 2) > 1e-4


def test_no_row_depends_on_the_others():
    """Alone, without any sorting, or in a batch that sorts and adjusts: the same tokens."""
    logits = logits_of(1, 6, 500, coarse=False)
    plain = [Sampler(Sampling(temperature=1.3, min_p=0.01, seed=seed)).rules(500) for seed in range(3)]
    other = [Sampler(Sampling(temperature=0.7, top_p=0.8, seed=9), Banned([(3,)]), {5: 2.0}).rules(500, 5)] * 3
    together = drawn(logits, [*plain, *other])
    alone = [drawn(logits[place : place + 1], [rule])[0] for place, rule in enumerate([*plain, *other])]
    assert together == alone


def test_rows_without_a_valid_draw_return_their_code():
    logits = np.zeros((4, 40), np.float32)
    logits[0, 7], logits[1, 3] = np.nan, np.inf
    rule = Sampler(Sampling(temperature=1.0, seed=0)).rules(40)
    nothing = replace(rule, allowed=np.zeros(2, np.uint32))
    tokens = drawn(logits, [rule, rule, nothing, None])
    assert [one.token for one in tokens[:3]] == [NOT_FINITE, NOT_FINITE, NONE_ALLOWED]
    assert tokens[3] == NO_DRAW


def test_a_draw_never_asks_the_device():
    """A query inside a capture would end it: every variant runs on tensors without memory."""
    rows = DeviceDrawRules(8, 128256, meta.META)
    logits = torch.zeros(8, 128256, device=meta.META)
    for bits in range(8):
        variant = DrawVariant(*(bool(bits >> place & 1) for place in range(3)))
        with meta.AskingTheDevice():
            assert drawn_tokens(logits, rows, variant).shape == (8,)


PHRASE = np.random.default_rng(5).integers(2, 97, 20).tolist()
REQUESTS = [
    Request(PHRASE * 8, max_new_tokens=20, ignore_eos=True, sampling=Sampling(temperature=0.9, seed=1), logprobs=3),
    Request(PHRASE * 2, max_new_tokens=15, sampling=Sampling(temperature=1.2, top_p=0.9, top_k=50, seed=2)),
    Request(PHRASE * 3, max_new_tokens=18, ignore_eos=True, continuation_token_ids=PHRASE[:3], sampling=Sampling(
        temperature=0.7, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=3)),
    Request(PHRASE, max_new_tokens=12, banned_token_ids=[[token] for token in range(2, 40)], logit_bias={50: 5.0}),
    Request(PHRASE, max_new_tokens=9, min_tokens=5, sampling=Sampling(temperature=0.5, seed=4), keep_logits=True),
    Request(PHRASE, max_new_tokens=6, ignore_eos=True, logit_bias=dict.fromkeys(range(90), 0.5)),
]  # fmt: skip


@pytest.fixture(scope="module")
def executor(make_program) -> TorchExecutor:
    return TorchExecutor(make_program("rocketkv", max_output_len=40, draft_tokens=4), device="cpu")


def test_a_gpu_draws_unless_that_is_switched_off(executor, monkeypatch):
    monkeypatch.setattr(executor, "device", torch.device("cuda"))
    assert executor.draws
    with DEVICE_SAMPLING.off():
        assert not executor.draws


def without_logprobs(outputs):
    return [replace(one, logprobs=None) for one in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["steps", "drafts"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_session_answers_as_with_the_hosts_sampler(executor, rows, speculation, monkeypatch):
    """Every kind of rule, alone and in batches, with drafts and without: the host's tokens for the same seeds."""
    monkeypatch.setattr("kvc_trt.runtime.session.drafting.Payoff", Always)
    assert not executor.draws, "on a CPU the host draws"
    expected = Session(executor, None, rows).generate(REQUESTS)
    monkeypatch.setattr(TorchExecutor, "draws", True)
    assert isinstance(executor, DrawingExecutor)
    fetched = []
    monkeypatch.setattr(executor, "decode", lambda *given: fetched.append(given))
    session = Session(executor, None, rows, speculation=speculation)
    found = session.generate(REQUESTS)
    assert not fetched, "logits were asked for"
    assert without_logprobs(found) == without_logprobs(expected)
    ours, theirs = found[0].logprobs, expected[0].logprobs
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)
    if speculation is not None:
        assert session.timings.draft_runs > 0


def test_rules_that_change_too_many_tokens_bring_back_logits():
    vocab = 2 * CHANGES
    few, many = (Sampler(Sampling(), biases=dict.fromkeys(range(count), 1.0)) for count in (CHANGES, CHANGES + 1))
    step = StaticStep.__new__(StaticStep)
    step.rows, step.count, step._capturer = 2, 1, Capturer(CPU)
    step._logits = step._host_logits = torch.from_numpy(logits_of(0, 2, vocab, coarse=False))
    (first,), (second,) = step.drawn([[few.rules(vocab)], [many.rules(vocab)]])
    assert first.token == few.choose(step._logits[0].numpy())
    assert (second == step._logits[1].numpy()).all()
