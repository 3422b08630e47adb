"""Drafts in PyTorch: a pass equals its tokens' steps, and surplus tokens are taken back."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.graph.state import cache_sites
from kvc_trt.runtime import Request, Session, Speculation
from tests.rounding import assert_close
from tests.runtime.test_speculation import Always

DRAFT_TOKENS = 4
POLICIES = ("full", "hybrid", "rocketkv, a skipped layer", "rocketkv, bounds in fp8")


def executor_of(make_program, policy: str) -> TorchExecutor:
    return TorchExecutor(make_program(policy, max_output_len=40, draft_tokens=DRAFT_TOKENS), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kept", range(1, 2 + DRAFT_TOKENS))
def test_a_pass_leaves_what_the_steps_leave_that_it_keeps(policy, kept, make_program):
    executors = [executor_of(make_program, policy) for _ in range(2)]
    generator = np.random.default_rng(0)
    prompts, positions = generator.integers(2, 97, (2, 200)), np.array([200, 31])
    for executor in executors:
        executor.allocate(2)
        prefilled = executor.prefill(prompts, positions)
        for row in range(2):
            executor.insert(prefilled, row, row)
    passes, steps = executors
    lengths = prefilled.cache_lengths
    for _ in range(3):
        tokens = generator.integers(2, 97, (1 + DRAFT_TOKENS, 2))
        checked = passes.check_draft(tokens, positions, lengths)
        for step in range(kept):
            logits = steps.decode(tokens[step], positions + step, lengths + step)
            assert_close(checked.logits[step], logits)
        if kept <= DRAFT_TOKENS:
            for row in range(2):
                passes.take_back(row, checked.undo[row], lengths[:, row], kept)
        positions, lengths = positions + kept, lengths + kept
        for site in cache_sites(passes.program.model, passes.program.parameters):
            for row in range(2):
                stored = lengths[site.cache, row]
                for name in ("k_cache", "v_cache"):
                    ours, theirs = (one.buffers[f"{name}.{site.name}"][row, :, :stored] for one in executors)
                    assert_close(ours, theirs)
            if site.parameters.has_pages:
                ours, theirs = (one.buffers[f"bounds.{site.name}"] for one in executors)
                assert_close(ours, theirs)


def test_a_session_answers_as_without(make_program, monkeypatch):
    monkeypatch.setattr("kvc_trt.runtime.session.drafting.Payoff", Always)
    executor = executor_of(make_program, "rocketkv, a skipped layer")
    phrase = np.random.default_rng(5).integers(2, 97, 20).tolist()
    requests = [Request(phrase * 10, max_new_tokens=30, ignore_eos=True), Request(phrase * 2, max_new_tokens=12)]
    expected = Session(executor, None, 2).generate(requests)
    session = Session(executor, None, 2, speculation=Speculation())
    assert session.generate(requests) == expected
    assert session.timings.draft_runs > 0
