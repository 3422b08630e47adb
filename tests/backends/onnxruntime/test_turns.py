"""Turns on the executor: in place, one copy of the weights, through a session, refused where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import read_graph
from kvc_trt.errors import InputError
from kvc_trt.runtime.request import Request
from kvc_trt.runtime.session.session import Session
from tests.backends.onnxruntime.shared_sessions import SharingExecutor
from tests.graph.small_models import open_session
from tests.rounding import assert_close


@pytest.fixture(scope="module")
def programs(make_program):
    """programs(name, ...): a program with turns."""
    return partial(make_program, turns=True)


POLICIES = ("full", "rocketkv", "sparq", "h2o", "tova", "streaming-llm", "keydiff", "expected-attention")


def tokens_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, 97, length).tolist() for length in lengths]


ROOM = {"max_input_len": 1000, "max_output_len": 8}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_are_updated_in_place_as_if_they_were_separate(programs, policy):
    program = programs(policy, **ROOM)
    executor = SharingExecutor(program, RunOptions(threads=1))
    executor.allocate(3)
    prompts = tokens_of(100, 40)
    ids = np.zeros((2, 128), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    prefilled = executor.prefill(ids, np.array([100, 40]))
    for row in range(2):
        executor.insert(prefilled, row, row + 1)
    untouched = {name: buffer[0].copy() for name, buffer in executor.buffers.items()}
    session = open_session(read_graph(program.extend), program.weight_file.path.parent)
    state = {tensor.name: executor.buffers[tensor.name][1:].copy() for tensor in program.state}
    names = [output.name for output in session.get_outputs()]
    lengths, positions = prefilled.cache_lengths, np.array([100, 40])
    for number in range(3):
        block = np.random.default_rng(number).integers(2, 97, (2, 60))
        given = {"lengths": np.array([60, 9]), "positions": positions, "cache_lengths": lengths}
        expected = dict(zip(names, session.run(None, {"input_ids": block, **given, **state}), strict=True))
        found = executor.extend(1, block, given["lengths"], positions, lengths)
        np.testing.assert_array_equal(found.logits, expected["logits"])
        np.testing.assert_array_equal(found.cache_lengths, expected["cache_lengths_out"])
        for tensor in program.state:
            after = expected[tensor.aliased_output]
            np.testing.assert_array_equal(executor.buffers[tensor.name][1:], after, err_msg=tensor.name)
            np.testing.assert_array_equal(executor.buffers[tensor.name][0], untouched[tensor.name])
            state[tensor.name] = after
        positions, lengths = positions + given["lengths"], found.cache_lengths


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sessions_turn_equals_its_tokens_fed_at_once(programs, policy):
    """Two rows, of which the second takes turns: the first one's tokens are those of a session of its own."""
    executor = SharingExecutor(programs(policy, **ROOM), RunOptions(threads=1))
    first, second, turn = tokens_of(70, 40, 30)

    def answers(requests, turns):
        session = Session(executor, None, 2)
        rows = session.add([Request(ids, max_new_tokens=8, ignore_eos=True) for ids in requests])
        found = {row: [] for row in rows}
        for number in range(8):
            for event in session.sample():
                found[event.row].append(event.token_id)
            if number == 2 and turns:
                session.turn(rows[-1], turn)
                continue  # its answer begins with the next sample; the other row feeds its token then
            session.advance()
        return [found[row] for row in rows]

    both = answers([first, second], turns=True)
    assert both[0][:3] == answers([first], turns=False)[0][:3]
    alone = answers([second], turns=True)
    assert both[1][:3] == alone[0][:3]


def test_a_conversation_goes_on_where_the_prompt_would_have(programs):
    executor = SharingExecutor(programs("full", max_output_len=100), RunOptions(threads=1))
    prompt, turn = tokens_of(50, 20)
    session = Session(executor, None, 1)
    (row,) = session.add([Request(prompt, max_new_tokens=100, ignore_eos=True)])
    said = [session.sample()[0].token_id]
    session.advance()
    said.append(session.sample()[0].token_id)
    session.turn(row, turn, max_new_tokens=3)
    answer = []
    while session.rows:
        answer += [event for event in session.step() if event.row == row]
    whole = session.generate([Request([*prompt, *said, *turn], max_new_tokens=3, ignore_eos=True)])[0]
    assert tuple(event.token_id for event in answer) == whole.token_ids
    assert answer[-1].output.token_ids == whole.token_ids
    assert answer[-1].output.prompt_token_ids == tuple(turn)
    assert answer[-1].output.logical_length == whole.logical_length


def test_turns_that_do_not_fit_are_refused_with_the_numbers_and_change_nothing(programs):
    session = Session(SharingExecutor(programs("full", max_output_len=16), RunOptions(threads=1)), None, 1)
    (row,) = session.add([Request(tokens_of(250)[0], max_new_tokens=4, ignore_eos=True)])
    for turn, words in (
        ([], "the turn is empty"),
        ([2] * 23, "a turn of 23 tokens after 250 ends at position 273, expected at most 272"),
        ([1000], "token 0 is 1000"),
    ):
        with pytest.raises(InputError, match=words):
            session.turn(row, turn)
    session.turn(row, [2] * 22)
    assert session.sample()[0].token_id >= 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_turn_may_end_at_the_last_position(programs, policy):
    program = programs(policy, **ROOM)
    room = program.limits.max_sequence_len - 70
    session = Session(SharingExecutor(program, RunOptions(threads=1)), None, 1)
    prompt, turn = tokens_of(70, room)
    (row,) = session.add([Request(prompt, max_new_tokens=4, ignore_eos=True)])
    session.turn(row, turn)
    (event,) = session.sample()
    assert (event.output.logical_length, event.output.finish_reason) == (70 + room, "capacity")


def test_keeping_caches_refuse_what_has_no_slot(programs):
    """Skipped layers keep everything, whatever the policy."""
    program = programs("rocketkv, a skipped layer", max_output_len=200)
    limits = replace(program.limits, max_sequence_len=10_000)
    executor = SharingExecutor(program, RunOptions(threads=1))
    executor._limits = limits
    session = Session(executor, None, 1)
    (row,) = session.add([Request(tokens_of(250)[0], max_new_tokens=4, ignore_eos=True)])
    with pytest.raises(InputError, match="cache 0 keeps every token, holds 250 and has 456 slots"):
        session.turn(row, [2] * 207)


def test_an_engine_without_the_graph_says_how_to_get_one(make_program):
    session = Session(SharingExecutor(make_program("rocketkv"), RunOptions(threads=1)), None, 1)
    (row,) = session.add([Request(tokens_of(50)[0])])
    with pytest.raises(InputError, match="no extend graph") as error:
        session.turn(row, [2])
    assert "kvc-trt build --config" in error.value.hint


def test_a_policy_without_turns_gives_its_reason(make_program):
    program = make_program("streaming-llm, positions of the cache")
    session = Session(SharingExecutor(program, RunOptions(threads=1)), None, 1)
    (row,) = session.add([Request(tokens_of(50)[0])])
    with pytest.raises(InputError, match="takes no turns: positions count entries of the cache"):
        session.turn(row, [2])


def test_three_sessions_read_one_copy_of_the_weights(programs):
    executor = OnnxRuntimeExecutor(programs("full"), RunOptions(threads=1))
    executor.load()
    assert executor.extend_session is not None
    places = {id(value) for value in executor._weights._lent.values()}
    assert len(places) == len(executor._weights._lent)
    lent = len(places)
    assert executor.prefill_session is not None
    assert len(executor._weights._lent) == lent


@pytest.mark.parametrize("policy", ["full", "quest-matched"])
def test_all_logits_of_a_turn_are_those_of_decode_steps(policy, programs):
    """Tried where steps read everything: `full`, and a policy that selects, within its dense limit."""
    settings = {"token_budget": 256} if policy != "full" else {}
    program = programs(policy, all_logits=True, max_input_len=128, max_output_len=64, **settings)
    executor = SharingExecutor(program, RunOptions(threads=1))
    prompt, text = tokens_of(100, 40, seed=7)
    stepping, turning = (
        Session(executor, None, 1),
        Session(SharingExecutor(executor.program, RunOptions(threads=1)), None, 1),
    )
    (row,) = stepping.add([Request(prompt, keep_logits=True)])
    stepping.extend(row, text)
    expected = []
    while stepping.queued(row):
        stepping.advance()
        expected.append(stepping._slots.find(row).answer.copy())
    (row,) = turning.add([Request(prompt)])
    found = turning.turn_logits(row, text)
    assert_close(found, np.array(expected))


def test_the_last_of_all_logits_are_those_of_an_engine_without(programs):
    """Rows of different lengths, under a policy that compacts: caches and answers do not depend on the option."""
    made = [programs("rocketkv", all_logits=every, **ROOM) for every in (True, False)]
    blocks, counts = np.random.default_rng(3).integers(2, 97, (2, 30)), np.array([30, 4])
    results = []
    for program in made:
        executor = SharingExecutor(program, RunOptions(threads=1))
        executor.allocate(2)
        prefilled = executor.prefill(np.random.default_rng(4).integers(2, 97, (2, 256)), np.array([250, 90]))
        for row in range(2):
            executor.insert(prefilled, row, row)
        found = executor.extend(0, blocks, counts, np.array([250, 90]), prefilled.cache_lengths)
        results.append((found, {name: buffer.copy() for name, buffer in executor.buffers.items()}))
    (every, one), (last, other) = results
    assert last.all_logits is None
    assert every.all_logits.shape == (2, 30, made[0].model.vocab_size)
    assert_close(every.logits, last.logits)
    np.testing.assert_array_equal(every.all_logits[1, 3], every.logits[1])
    np.testing.assert_array_equal(every.cache_lengths, last.cache_lengths)
    for name, buffer in one.items():
        np.testing.assert_array_equal(buffer, other[name], err_msg=name)
