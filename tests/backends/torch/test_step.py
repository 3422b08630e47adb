"""A step of fixed shapes over fixed memory, for replay as a CUDA graph: executed here without one."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.model.capturer import Capturer
from kvc_trt.backends.torch.model.step import StaticStep, rows_captured
from kvc_trt.kernels.c_library import KernelError
from kvc_trt.models.config import Experts, ModelDescription
from kvc_trt.progress import NullProgress
from kvc_trt.runtime import Sampling
from kvc_trt.runtime.executor import NOT_FINITE, GreedyExecutor
from kvc_trt.runtime.sampling.sampler import Sampler
from tests.backends.prompts import filled
from tests.backends.torch import meta
from tests.gpu import StandInCapturer

CPU = torch.device("cpu")


@pytest.fixture(
    scope="module",
    params=[("full", "auto"), ("rocketkv, a skipped layer", "auto"), ("snapkv++", "auto"), ("rocketkv", "int4")],
    ids=", ".join,
)
def executor(request, make_program):
    policy, kv_cache = request.param
    executor = TorchExecutor(make_program(policy, kv_cache=kv_cache))
    executor.allocate(5)
    return executor


def snapshot(executor):
    return {name: buffer.clone() for name, buffer in executor.state.items()}


def restore(executor, saved):
    for name, buffer in executor.state.items():
        buffer.copy_(saved[name])


def static(executor, rows, capturer=None):
    return StaticStep(executor.decoder, executor.state, rows, CPU, capturer or Capturer(CPU))


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_a_step_with_idle_rows_is_the_plain_step(rows, executor):
    """Logits and state, bit for bit; rows that are not fed stay as they are."""
    tokens, positions, lengths = filled(executor)
    before = snapshot(executor)
    moved = [torch.from_numpy(x) for x in (tokens, positions, np.ascontiguousarray(lengths))]
    plain = executor.decoder.decode(*moved, {name: buffer[:3] for name, buffer in executor.state.items()}).numpy()
    expected = snapshot(executor)
    restore(executor, before)
    step = static(executor, rows)
    step.run(tokens, positions, lengths)
    np.testing.assert_allclose(step.logits(3), plain, atol=1e-5)
    if rows == 3:
        assert (step.logits(3) == plain).all()
    for name, buffer in executor.state.items():
        torch.testing.assert_close(buffer, expected[name], atol=1e-5, rtol=0)
        assert torch.equal(buffer[3:], before[name][3:]), "an idle row was written"


def test_a_capture_changes_no_state(executor):
    filled(executor)
    before = snapshot(executor)
    static(executor, 5, StandInCapturer(CPU))
    assert all(torch.equal(buffer, before[name]) for name, buffer in executor.state.items())


def test_a_step_is_repeatable_with_other_inputs(executor):
    """No value of a former call stays: equal inputs give equal bits after others were fed in between."""
    tokens, positions, lengths = filled(executor)
    before, step = snapshot(executor), static(executor, 4)
    step.run(tokens, positions, lengths)
    first = step.logits(3).copy()
    step.run(tokens[:1] + 1, positions[:1], lengths[:, :1])
    restore(executor, before)
    step.run(tokens, positions, lengths)
    assert (step.logits(3) == first).all()


def test_inputs_stay_until_they_are_copied(executor):
    """Queued twice in a row: the second step waits for the first one's copy before it writes its own inputs."""
    tokens, positions, lengths = filled(executor)
    step, seen = static(executor, 3), []

    class Copied:
        def synchronize(self):
            seen.append(step._staging[0].tolist())

        def record(self):
            seen.append("queued")

    step._copied = Copied()
    step.run(tokens, positions, lengths)
    step.run(tokens + 1, positions + 1, lengths + 1)
    assert seen == [[0, 0, 0], "queued", tokens.tolist(), "queued"]


def test_greedy_decoding_brings_back_the_best_tokens(executor):
    tokens, positions, lengths = filled(executor)
    before = snapshot(executor)
    expected = executor.decode(tokens, positions, lengths).argmax(-1)
    restore(executor, before)
    runs = executor.runs
    assert isinstance(executor, GreedyExecutor)
    assert executor.decode_greedy(tokens, positions, lengths).tolist() == expected.tolist()
    assert executor.runs == runs + 1


def test_the_lowest_of_equal_logits_is_best_and_non_finite_ones_are_reported(executor, monkeypatch):
    tied = torch.zeros(4, executor.limits.vocab_size)
    tied[0, [7, 3, 50]] = 1.0
    tied[1, 9] = torch.inf
    tied[2, 5] = torch.nan
    monkeypatch.setattr(executor.decoder, "decode", lambda *arguments: tied)
    step = static(executor, 4)
    step.run(np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros((3, 4), np.int64))
    assert step.best(4).tolist() == [3, NOT_FINITE, NOT_FINITE, 0]


def test_few_graphs_serve_every_number_of_rows():
    assert [rows_captured(rows, 12) for rows in range(1, 13)] == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]
    assert rows_captured(1, 1) == 1


@pytest.mark.parametrize("kv_cache", ["auto", "k8v4"])
@pytest.mark.parametrize("policy", ["full", "rocketkv"])
def test_a_step_never_asks_the_device(policy, kv_cache):
    """Takes the GPU's branches at the size of Llama-3.1-8B: a query inside a capture would end it."""
    decoder = meta.decoder(policy, 32768, kv_cache=kv_cache)
    inputs = torch.zeros(2 + meta.LAYERS, 8, dtype=torch.int64, device=meta.META)
    with meta.AskingTheDevice():
        logits = decoder.decode(inputs[0], inputs[1], inputs[2:], meta.state(decoder.parameters, 8))
    assert (logits.shape, logits.dtype) == ((8, 128256), torch.float32)


def test_the_watch_for_device_synchronisation_detects_one():
    with pytest.raises(AssertionError, match="waits for the device"), meta.AskingTheDevice():
        torch.ones(3)[torch.ones(3) > 0]


def test_a_cpu_captures_nothing_and_warns_of_nothing(caplog):
    capturer, calls = Capturer(CPU, "values are kept"), []
    capturer.capture(lambda: calls.append(1))()
    assert (calls, capturer.refused, caplog.text) == ([1], None, "")


def test_steps_that_are_not_captured_run_and_say_why(caplog):
    capturer = Capturer(torch.device("cuda"), "inner values are kept")

    def body():
        raise AssertionError("nobody asked for a run")

    assert capturer.capture(body) is body
    assert "without a CUDA graph" in caplog.text
    assert "inner values are kept" in caplog.text


def test_a_failed_capture_falls_back_once_and_for_all(caplog, monkeypatch):
    attempts = []

    def fails(capturer, body):
        attempts.append(body)
        raise RuntimeError("operation not permitted when stream is capturing\nwith more lines")

    monkeypatch.setattr(Capturer, "_warm_up", lambda capturer, body: body())
    monkeypatch.setattr(Capturer, "_captured", fails)
    capturer = Capturer(torch.device("cuda"))

    def body():
        pass

    with caplog.at_level(logging.WARNING):
        assert [capturer.capture(body), capturer.capture(body)] == [body, body]
    assert len(attempts) == 1
    assert capturer.refused == "operation not permitted when stream is capturing"
    assert caplog.text.count("operation not permitted") == 1


def test_warming_up_captures_every_number_of_rows(make_program, monkeypatch):
    """The largest comes first; a step after it captures nothing. Covers steps, passes over drafts and plain draws."""
    executor = TorchExecutor(make_program("rocketkv", max_output_len=40, draft_tokens=2), device="cpu")
    executor.capturer = StandInCapturer(CPU)
    monkeypatch.setattr(TorchExecutor, "draws", True)
    executor.allocate(5)
    bodies, shown = [], []
    monkeypatch.setattr(executor.capturer, "capture", lambda body: bodies.append(body) or body)

    class Shown(NullProgress):
        @contextmanager
        def task(self, description, total):
            shown.append((description, total))
            yield shown.append

    executor.warm_up(Shown(), drafts=True)
    assert list(executor._steps) == [(rows, count) for count in (3, 1) for rows in (5, 4, 2, 1)]
    assert shown == [("compiling and capturing steps", 8), *[1] * 8]
    made = len(bodies)
    assert made == 8 * 3
    tokens, positions, lengths = filled(executor)
    rule = Sampler(Sampling(temperature=1.0, top_p=0.9, seed=0)).rules(executor.limits.vocab_size)
    executor.decode_drawn(tokens, positions, lengths, [rule] * len(tokens))
    assert len(bodies) == made


def test_on_a_cpu_there_is_nothing_to_warm_up(executor):
    before = dict(executor._steps)
    executor.warm_up(NullProgress(), drafts=False)
    assert executor._steps == before


def test_a_kernel_that_is_refused_in_a_capture_ends_the_captures_with_its_reason(caplog, monkeypatch):
    def refused(capturer, body):
        raise KernelError(3, "kvc_hybrid_attention: kernel page_scores: out of resources")

    monkeypatch.setattr(Capturer, "_warm_up", lambda capturer, body: None)
    monkeypatch.setattr(Capturer, "_captured", refused)
    capturer = Capturer(torch.device("cuda"))

    def body():
        pass

    assert capturer.capture(body) is body
    assert "page_scores: out of resources" in capturer.refused
    assert "page_scores: out of resources" in caplog.text


@pytest.mark.parametrize("count", [2, 5])
def test_a_pass_of_several_tokens_leaves_idle_rows_alone(count, make_program):
    """A pass for five rows that feeds three: what three rows alone give, and nothing else is written."""
    executor = TorchExecutor(make_program("rocketkv", max_output_len=40, draft_tokens=4), device="cpu")
    executor.allocate(5)
    _, positions, lengths = filled(executor)
    tokens = np.random.default_rng(1).integers(2, 97, (count, 3))
    before, found = snapshot(executor), []
    for rows in (3, 5):
        restore(executor, before)
        step = StaticStep(executor.decoder, executor.state, rows, CPU, Capturer(CPU), count=count)
        step.run(tokens, positions, lengths)
        found.append((step.logits(3).copy(), snapshot(executor)))
    (alone, state), (idle, with_idle) = found
    np.testing.assert_allclose(idle, alone, atol=1e-5)
    for name, buffer in with_idle.items():
        torch.testing.assert_close(buffer, state[name], atol=1e-5, rtol=0)
        assert torch.equal(buffer[3:], before[name][3:]), "an idle row was written"


def test_only_steps_that_group_tokens_by_expert_are_not_captured(make_program):
    """The others keep their graphs, also where a larger step comes first, as when an engine is warmed up."""
    made = make_program("full")
    experts = replace(made.model, description=ModelDescription(experts=Experts(4, 2, 32)))
    for model, captured in ((made.model, {1: True, 16: True, 17: True}), (experts, {17: False, 16: True, 1: True})):
        executor = TorchExecutor(made, device="cpu")
        executor.load()
        executor.program, executor.device = replace(made, model=model), torch.device("cuda")
        assert {tokens: executor.capturer_of(tokens).captures for tokens in captured} == captured
