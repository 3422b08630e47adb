"""Whatever one request does wrong, the others' tokens, logits and caches are those of a run without it, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.contexts import RowPacking, read_context, write_context
from kvc_trt.errors import Cancelled, DeadlineMissed, InputError
from kvc_trt.runtime import Request, Scheduler, Session
from tests.backends.onnxruntime.test_turns import tokens_of
from tests.contexts.conftest import FINGERPRINT

POLICIES = ("rocketkv", "full", "h2o")
PROMPTS = tokens_of(150, 60, 40)
LONG, TURN = tokens_of(250, 9, seed=1)


@pytest.fixture(scope="module")
def program(request, make_program):
    return make_program(request.param, turns=True, max_output_len=24)


class Run:
    """Two long answers beside a conversation that waits for a turn, over one executor."""

    def __init__(self, program, executor):
        self.packing = RowPacking(program, FINGERPRINT)
        session = Session(executor, None, 4, packing=self.packing)
        self.scheduler = Scheduler(session, prefill_slice_ms=1e6)  # one slice, so that the same rows step together
        self.conversation = self.submit(PROMPTS[2], 2)
        self.finish()
        self.answers = [self.submit(prompt, new) for prompt, new in zip(PROMPTS, (20, 16), strict=False)]
        for _ in range(4):
            self.scheduler.advance()
        assert len(self.scheduler.session.rows) == 2

    def submit(self, prompt, new, **options):
        return self.scheduler.submit(Request(prompt, new, keep_logits=True, stay=True, ignore_eos=True, **options))

    def read_in_slices(self):
        """Read prompts in the shortest slices from now on."""
        self.scheduler._worker._slice_seconds = 1e-6

    def finish(self):
        while self.scheduler.advance():
            pass

    def found(self):
        """Tokens of all answers, the conversation's next one included, and the state of the rows afterwards."""
        self.finish()
        turn = self.scheduler.ask(self.conversation, TURN, max_new_tokens=4)
        self.finish()
        tickets = [*self.answers, turn]
        rows = {one.last: one.row for one in self.scheduler._waiting.parked._rows}
        assert set(rows) == set(tickets), "nobody else has a row"
        contexts = [self.scheduler.session.take(rows[ticket]) for ticket in tickets]
        held = [
            (one.token_digest, one.logits.tobytes(), {name: tensor.tobytes() for name, tensor in one.tensors.items()})
            for one in contexts
        ]
        self.scheduler.close()
        assert self.scheduler.session.free == 4
        return [ticket.result(0).token_ids for ticket in tickets], held


@pytest.fixture(scope="module")
def executor(program):
    return OnnxRuntimeExecutor(program, RunOptions(threads=1))


@pytest.fixture(scope="module")
def expected(program, executor):
    return Run(program, executor).found()


def a_turn_that_does_not_fit(run, path):
    longer = run.scheduler.ask(run.conversation, LONG)
    run.finish()
    with pytest.raises(InputError, match=r"a turn of 251 tokens (after 41 ends at position 292|does not fit)"):
        longer.result(0)


def an_empty_turn(run, path):
    with pytest.raises(InputError, match="the turn is empty"):
        run.scheduler.ask(run.conversation, [])


def a_token_that_is_none(run, path):
    with pytest.raises(InputError, match="token 1 is 97"):
        run.scheduler.ask(run.conversation, [5, 97])


def two_turns_on_one_row(run, path):
    """The first is the one that is answered; here it is the one that every run asks."""
    ask = run.scheduler.ask

    def twice(last, tokens, **options):
        turn = ask(last, tokens, **options)
        with pytest.raises(InputError, match="another turn waits for its row"):
            ask(last, LONG)
        return turn

    run.scheduler.ask = twice


def a_turn_while_its_row_answers(run, path):
    with pytest.raises(InputError, match="is being answered"):
        run.scheduler.ask(run.answers[0], TURN)


def context_of(run):
    (row,) = [one.row for one in run.scheduler._waiting.parked._rows]
    return run.scheduler.session.take(row)


def a_context_of_another_engine(run, path):
    context = context_of(run)
    other = replace(context, fingerprint=replace(FINGERPRINT, weights="f" * 64))
    with pytest.raises(InputError, match="made by an engine with other weights"):
        run.submit([], 2, context=other)


def a_context_file(run, path, spoil, message):
    write_context(path, context_of(run))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(InputError, match=message):
        run.submit([], 2, context=read_context(path, run.packing))


def a_context_of_another_version(run, path):
    a_context_file(
        run,
        path,
        lambda content: content.replace(b'\\"version\\":1', b'\\"version\\":2'),
        "context format 2, expected 1",
    )


def a_context_cut_short(run, path):
    a_context_file(run, path, lambda content: content[:-100], "a damaged one")


def a_context_that_was_changed(run, path):
    a_context_file(run, path, lambda content: content[:-1] + bytes([content[-1] ^ 1]), "was changed: its checksum is")


def a_prompt_that_is_cancelled_between_slices(run, path):
    run.read_in_slices()
    ticket = run.submit(LONG, 4)
    for _ in range(2):
        run.scheduler.advance()
        assert run.scheduler.metrics()["joining"] == 1
    ticket.cancel()
    run.finish()
    with pytest.raises(Cancelled):
        ticket.result(0)


def a_prompt_whose_time_is_over_between_slices(run, path):
    run.read_in_slices()
    ticket = run.submit(LONG, 4)
    run.scheduler.advance()
    ticket.deadline = run.scheduler.clock()
    run.finish()
    with pytest.raises(DeadlineMissed):
        ticket.result(0)


def a_deadline_in_the_past(run, path):
    with pytest.raises(DeadlineMissed, match="seconds ago"):
        run.scheduler.submit(Request(LONG, 4), deadline=run.scheduler.clock() - 1)
    with pytest.raises(DeadlineMissed, match="seconds ago"):
        run.scheduler.ask(run.conversation, TURN, deadline=run.scheduler.clock() - 1)


def a_row_of_logits_that_are_not_numbers(run, path):
    """The caches of that row hold no numbers either."""
    context = context_of(run)
    spoiled = {
        name: np.full_like(one, np.nan) if one.dtype.kind == "f" else one for name, one in context.tensors.items()
    }
    ticket = run.submit([5], 9, context=replace(context, tensors=spoiled))
    run.finish()
    with pytest.raises(InputError, match="the engine's logits are not finite after"):
        ticket.result(0)


WRONG = [
    a_turn_that_does_not_fit, an_empty_turn, a_token_that_is_none, two_turns_on_one_row, a_turn_while_its_row_answers,
    a_context_of_another_engine, a_context_of_another_version, a_context_cut_short, a_context_that_was_changed,
    a_prompt_that_is_cancelled_between_slices, a_prompt_whose_time_is_over_between_slices, a_deadline_in_the_past,
    a_row_of_logits_that_are_not_numbers,
]  # fmt: skip


COMPUTED = (
    a_prompt_that_is_cancelled_between_slices, a_prompt_whose_time_is_over_between_slices,
    a_row_of_logits_that_are_not_numbers,
)  # fmt: skip
IN_TURN = [
    pytest.param(
        policy, wrong, id=f"{policy}-{wrong.__name__}",
        marks=[] if wrong in COMPUTED or policy == POLICIES[number % len(POLICIES)] else pytest.mark.exhaustive,
    )
    for policy in POLICIES
    for number, wrong in enumerate(WRONG)
]  # fmt: skip
"""Every policy with what it computes something for; the others, refused before any operator runs, in turn."""


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("program", "wrong"), IN_TURN, indirect=["program"], scope="module")
def test_neighbours_answer_as_without_the_bad_request(program, executor, expected, wrong, tmp_path):
    run = Run(program, executor)
    wrong(run, tmp_path / "context")
    assert run.found() == expected


@pytest.mark.parametrize("program", POLICIES, indirect=True)
def test_the_answers_tell_rows_apart(expected):
    tokens, held = expected
    assert len(set(tokens)) == len({digest for digest, _, _ in held}) == 3
