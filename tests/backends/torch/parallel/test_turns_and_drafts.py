"""Turns and passes over drafts, built from the decoder's parts, run on ranks as in one process."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.runtime import Sampling
from kvc_trt.runtime.executor import NO_DRAW, Drawn
from kvc_trt.runtime.sampling.sampler import Sampler

pytestmark = pytest.mark.slow

DRAFT_TOKENS = 3


@pytest.fixture(params=[2, 4])
def both(request, make_program, on_shared_ranks):
    """The same program in one process and on ranks; the first two of three rows hold prompts of 90 and 20 tokens."""
    needed = {"turns": True, "all_logits": True, "draft_tokens": DRAFT_TOKENS}
    program = make_program("rocketkv, a skipped layer", max_input_len=400, max_output_len=40, **needed)
    executors = TorchExecutor(program, device="cpu"), on_shared_ranks(program, request.param)
    prompts, lengths = np.random.default_rng(0).integers(2, 97, (2, 90)), np.array([90, 20])
    for executor in executors:
        executor.allocate(3)
        prefilled = executor.prefill(prompts, lengths)
        for row in range(2):
            executor.insert(prefilled, row, row)
    return *executors, lengths, prefilled.cache_lengths


def assert_same_state(one, several):
    for name, buffer in one.buffers.items():
        np.testing.assert_allclose(several.buffers[name], buffer, atol=2e-5, err_msg=name)


def test_a_turn_gives_the_same_logits_and_keeps_the_same_tokens(both):
    one, several, lengths, stored = both
    block, counts = np.random.default_rng(1).integers(2, 97, (2, 50)), np.array([50, 3])
    expected, found = (executor.extend(0, block, counts, lengths, stored) for executor in (one, several))
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)
    np.testing.assert_allclose(found.all_logits[0], expected.all_logits[0], atol=1e-5)
    np.testing.assert_array_equal(found.cache_lengths, expected.cache_lengths)
    kept = [name for name in one.buffers if name.startswith("slot_positions")]
    assert len(kept) == 2
    for name in kept:
        np.testing.assert_array_equal(several.buffers[name], one.buffers[name], err_msg=name)
    assert_same_state(one, several)


def test_a_pass_over_a_draft_is_taken_back_on_every_rank(both):
    one, several, lengths, stored = both
    tokens = np.random.default_rng(2).integers(2, 97, (1 + DRAFT_TOKENS, 2))
    expected, found = (executor.check_draft(tokens, lengths, stored) for executor in (one, several))
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)
    for executor, checked in ((one, expected), (several, found)):
        for row in range(2):
            executor.take_back(row, checked.undo[row], stored[:, row], 1)
    assert_same_state(one, several)


@pytest.mark.one_in(2)
def test_ranks_draw_the_tokens_that_one_process_draws(both):
    """A step and a pass over a draft, by rules; a row without rules gets its logits."""
    one, several, lengths, stored = both
    vocab, generator = one.limits.vocab_size, np.random.default_rng(3)
    rules = [Sampler(Sampling(temperature=0.8, top_p=0.9, seed=seed)).rules(vocab, 2) for seed in range(2)]
    tokens = generator.integers(2, 97, (1 + DRAFT_TOKENS, 2))
    for given in ([rules[0], rules[1]], [rules[0], None]):
        expected, found = (x.decode_drawn(tokens[0], lengths, stored, iter(given)) for x in (one, several))
        for ours, theirs in zip(found, expected, strict=True):
            if isinstance(theirs, Drawn):
                assert ours.token == theirs.token
            else:
                np.testing.assert_allclose(ours, theirs, atol=1e-5)
    expected, found = (x.check_draft_drawn(tokens, lengths, stored, [rules, rules[:1]]) for x in (one, several))
    assert [[answer.token for answer in row] for row in found.answers] == [
        [answer.token for answer in row] for row in expected.answers
    ]
    assert found.answers[1][1] == NO_DRAW
    assert_same_state(one, several)
