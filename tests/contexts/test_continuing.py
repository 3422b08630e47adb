"""A row that starts from a stored context goes on as the row it was taken from, under every policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.backends.run_options import RunOptions
from kvc_trt.contexts import read_context, write_context
from kvc_trt.errors import InputError
from kvc_trt.runtime import Request, Sampling, Session
from tests.backends.onnxruntime.shared_sessions import SharingExecutor
from tests.contexts.conftest import packing_of
from tests.every_policy import BY_ROW, EVERY
from tests.small_model import SMALL

PROMPT = np.random.default_rng(3).integers(2, 97, 200).tolist()
OTHER = np.random.default_rng(4).integers(2, 97, 77).tolist()


DEEPER = replace(SMALL, num_hidden_layers=5)
"""Layers enough for prompts to divide a budget differently."""


@pytest.fixture(scope="module", params=(*EVERY, *BY_ROW))
def program(request, make_program):
    return make_program(request.param, turns=True, model=DEEPER if request.param in BY_ROW else SMALL)


def session_of(program, rows=1, executor=SharingExecutor, prefix_bytes=0):
    options = {"packing": packing_of(program), "prefix_bytes": prefix_bytes}
    return Session(executor(program, RunOptions(threads=1)), None, rows, **options)


def through_a_file(context, program, tmp_path):
    write_context(tmp_path / "context", context, replace=True)
    return read_context(tmp_path / "context", packing_of(program))


def state_of(session, row):
    state = session.executor.read_row(session.rows.index(row))
    return {name: array.tobytes() for name, array in state.items()}


def steps(session, count):
    """Return the tokens and logits of every row, by row."""
    seen = []
    for _ in range(count):
        tokens = {event.row: event.token_id for event in session.step()}
        seen.append({row: (token, session.take(row).logits.tobytes()) for row, token in tokens.items()})
    return seen


@pytest.mark.one_in(3)
def test_a_restored_row_goes_on_bit_for_bit(program, tmp_path):
    running = session_of(program)
    (row,) = running.add([Request(PROMPT, 16, ignore_eos=True)])
    after_prompt, at_first = running.take(row), state_of(running, row)
    first = steps(running, 5)
    in_the_answer, later = running.take(row), state_of(running, row)
    second = steps(running, 5)

    for context, state, expected in (
        (after_prompt, at_first, [*first, *second]),
        (in_the_answer, later, second),
    ):
        restored = session_of(program)
        stored = through_a_file(context, program, tmp_path)
        (again,) = restored.add([Request([], 16, context=stored, ignore_eos=True)])
        assert state_of(restored, again) == state
        assert restored.take(again).token_digest == context.token_digest
        found = steps(restored, len(expected))
        assert [seen[again] for seen in found] == [seen[row] for seen in expected]
        assert state_of(restored, again) == state_of(running, row)
        assert restored.take(again).token_digest == running.take(row).token_digest


@pytest.mark.one_in(3)
def test_a_turn_of_a_restored_row_is_that_of_the_row(program, tmp_path):
    """A turn's compaction depends on state that no step reads: a stored context includes it."""
    running, restored = session_of(program), session_of(program)
    (row,) = running.add([Request(PROMPT, 16, ignore_eos=True)])
    steps(running, 3)
    stored = through_a_file(running.take(row), program, tmp_path)
    (again,) = restored.add([Request([], 16, context=stored, ignore_eos=True)])
    for session, one in ((running, row), (restored, again)):
        session.turn(one, OTHER[:20], 6)
    assert restored.take(again).logits.tobytes() == running.take(row).logits.tobytes()
    assert restored.take(again).token_digest == running.take(row).token_digest
    assert state_of(restored, again) == state_of(running, row)
    expected, found = steps(running, 5), steps(restored, 5)
    assert [seen[again] for seen in found] == [seen[row] for seen in expected]
    assert state_of(restored, again) == state_of(running, row)


def test_rows_of_a_batch_go_on_as_they_would_alone(program, tmp_path):
    """One row is restored beside one that is prefilled with it, into a batch that is decoding."""
    alone = session_of(program)
    (row,) = alone.add([Request(PROMPT, 6, ignore_eos=True)])
    context = through_a_file(alone.take(row), program, tmp_path)
    alone.remove(row)
    answers = [alone.generate([Request(prompt, 6, ignore_eos=True)])[0] for prompt in (PROMPT, OTHER, PROMPT[:50])]

    session, outputs = session_of(program, rows=3), {}
    (running,) = session.add([Request(OTHER, 6, ignore_eos=True)])
    session.step()
    joined = session.add([Request([], 6, context=context, ignore_eos=True), Request(PROMPT[:50], 6, ignore_eos=True)])
    while session.rows:
        outputs |= {event.row: event.output for event in session.step() if event.output is not None}
    found = [outputs[row] for row in (joined[0], running, joined[1])]
    assert [output.token_ids for output in found] == [answer.token_ids for answer in answers]
    assert [output.physical_lengths for output in found] == [answer.physical_lengths for answer in answers]
    assert [output.reused_tokens for output in found] == [200, 0, 0]


@pytest.mark.parametrize("policy", BY_ROW)
def test_a_context_has_the_capacities_of_its_own_prompt(policy, make_program, tmp_path):
    """Other prompts have others, so that the tests above see rows of different capacities."""
    program = make_program(policy, turns=True, model=DEEPER)
    session = session_of(program)
    found = []
    for prompt in (PROMPT, OTHER, PROMPT[:50]):
        (row,) = session.add([Request(prompt, 1)])
        state = session.executor.read_row(0)
        context = through_a_file(session.take(row), program, tmp_path)
        session.remove(row)
        found.append(
            tuple(int(array.item()) for name, array in sorted(state.items()) if name.startswith("cache_capacities"))
        )
        kept = [int(array.item()) for name, array in sorted(context.tensors.items())
                if name.startswith("cache_capacities")]  # fmt: skip
        assert kept == list(found[-1])
        assert len(kept) == program.model.num_hidden_layers
    assert len(set(found)) > 1, found


def test_equal_seeds_draw_equal_tokens(program, tmp_path):
    rule = {"max_new_tokens": 8, "sampling": Sampling(temperature=0.9, top_p=0.9, seed=5), "ignore_eos": True}
    session = session_of(program)
    (row,) = session.add([Request(PROMPT, 1)])
    context = through_a_file(session.take(row), program, tmp_path)
    session.remove(row)
    fresh = session.generate([Request(PROMPT, **rule)])[0]
    restored = session.generate([Request([], context=context, **rule)])[0]
    assert restored.token_ids == fresh.token_ids


def test_a_prompt_after_a_context_is_a_turn(program, tmp_path):
    question = PROMPT[:5]
    session = session_of(program)
    (row,) = session.add([Request(PROMPT, 6, ignore_eos=True)])
    context = through_a_file(session.take(row), program, tmp_path)
    session.turn(row, question)
    while session.rows:
        (event,) = session.step()
    turned = event.output
    found = session.generate([Request(question, 6, context=context, ignore_eos=True)])[0]
    assert found.token_ids == turned.token_ids
    assert found.physical_lengths == turned.physical_lengths
    assert (found.logical_length, found.reused_tokens) == (turned.logical_length, 200)
    assert found.prompt_token_ids == tuple(question)


@pytest.mark.parametrize("policy", ["full", "rocketkv", "h2o"])
def test_without_turns_a_prompt_after_a_context_is_a_continuation(policy, make_program, tmp_path):
    program, question = make_program(policy), PROMPT[:5]
    session = session_of(program)
    fed = session.generate([Request(PROMPT, 6, continuation_token_ids=question, ignore_eos=True)])[0]
    (row,) = session.add([Request(PROMPT, 1)])
    context = through_a_file(session.take(row), program, tmp_path)
    session.remove(row)
    found = session.generate([Request(question, 6, context=context, ignore_eos=True)])[0]
    assert found.token_ids == fed.token_ids
    assert (found.logical_length, found.physical_lengths) == (fed.logical_length, fed.physical_lengths)


def test_continuations_too_long_for_a_context_are_refused_before_running(program):
    """The positions are used up after 272 tokens, whatever the policy keeps; a continuation follows step by step."""
    session = session_of(program)
    (row,) = session.add([Request(PROMPT, 6)])
    context = session.take(row)
    session.remove(row)
    with pytest.raises(
        InputError, match="prompt: a turn of 73 tokens after 200 ends at position 273, expected at most 272"
    ):
        session.add([Request(OTHER[:73], 1, context=context)])
    with pytest.raises(InputError, match="73 tokens do not fit after 200 tokens, found room for"):
        session.add([Request(OTHER[:33], 1, context=context, continuation_token_ids=OTHER[:40])])
    assert session.rows == ()
    assert len(session.generate([Request(OTHER[:72], 1, context=context)])[0].token_ids) == 1


CROSSED = ["full", "rocketkv", "rocketkv, bounds in fp8", "snapkv++", "hybrid", "snapkv-gqa"]


@pytest.mark.parametrize("policy", CROSSED)
@pytest.mark.parametrize("from_torch", [False, True])
def test_a_context_goes_on_under_another_executor(policy, from_torch, make_program, tmp_path):
    """The state is of one executor, what follows of another: logits agree as the executors do."""
    from kvc_trt.backends.torch.executor import TorchExecutor

    program = make_program(policy)
    maker, taker = (TorchExecutor, SharingExecutor) if from_torch else (SharingExecutor, TorchExecutor)
    made = session_of(program, executor=maker)
    (row,) = made.add([Request(PROMPT, 16, keep_logits=True, continuation_token_ids=OTHER[:8], ignore_eos=True)])
    restored = session_of(program, executor=taker)
    context = through_a_file(made.take(row), program, tmp_path)
    (again,) = restored.add([Request(OTHER[:8], 16, context=context, keep_logits=True, ignore_eos=True)])
    for _ in range(8):
        made.advance()
        restored.advance()
        expected, found = made.take(row), restored.take(again)
        np.testing.assert_allclose(found.logits, expected.logits, atol=2e-4)
        assert found.token_digest == expected.token_digest


def test_a_shared_prefix_is_a_context_that_the_rest_continues(program):
    """Whatever the policy; only those that keep every token also share prompts that they were not asked to."""
    session = session_of(program, rows=2, prefix_bytes=1 << 30)
    (row,) = session.add([Request(PROMPT, 1)])
    prefix = session.take(row)
    session.remove(row)
    session.contexts.share(prefix)
    explicit = session.generate([Request(OTHER[:4], 5, context=prefix, ignore_eos=True)])[0]
    requests = [Request([*PROMPT, *OTHER[:4]], 5, ignore_eos=True), Request(OTHER, 5, ignore_eos=True)]
    shared, fresh = session.generate(requests)
    assert shared.token_ids == explicit.token_ids
    assert (shared.reused_tokens, fresh.reused_tokens) == (200, 0)
    assert shared.prompt_token_ids == (*PROMPT, *OTHER[:4])
    again = session.generate(requests[1:])[0]
    assert again.token_ids == fresh.token_ids
    assert again.reused_tokens == (len(OTHER) if program.parameters.keeps_every_token else 0)


def test_policies_that_keep_every_token_answer_alike_with_and_without_a_prefix(program):
    """Under RocketKV-MT steps read what the rest of the prompt admits, but the first token is that of all of it."""
    if not program.parameters.keeps_every_token:
        pytest.skip("it evicts")
    prompt = [*PROMPT, *OTHER[:6]]
    whole, shared = session_of(program), session_of(program, prefix_bytes=1 << 30)
    shared.generate([Request(PROMPT, 1)])
    (row,), (again,) = whole.add([Request(prompt)]), shared.add([Request(prompt)])
    expected, found = whole.take(row), shared.take(again)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)
    assert found.token_digest == expected.token_digest
    assert found.cache_lengths == expected.cache_lengths
    assert shared.timings.turn_tokens == 6
