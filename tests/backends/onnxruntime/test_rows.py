"""A session over the real executor: a row's greedy answer does not depend on its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.runtime import Request, Session

CLEAR_MARGIN = 1e-3
LENGTHS = (1, 7, 31, 64, 129, 200, 256)
NEW_TOKENS = (16, 3, 9, 12, 16, 5, 8)


class Recording(OnnxRuntimeExecutor):
    """Keeps how far the two best logits of the only row are apart."""

    def allocate(self, max_batch_size):
        super().allocate(max_batch_size)
        self.margins = []

    def prefill(self, *arguments):
        prefilled = super().prefill(*arguments)
        self.margins.append(margin(prefilled.logits[0]))
        return prefilled

    def decode(self, *arguments):
        logits = super().decode(*arguments)
        self.margins.append(margin(logits[0]))
        return logits


def margin(logits):
    second, best = np.partition(logits, -2)[-2:]
    return best - second


def requests(lengths=LENGTHS, new_tokens=NEW_TOKENS):
    random = np.random.default_rng(5)
    return [
        Request(random.integers(2, 97, length).tolist(), max_new_tokens=new)
        for length, new in zip(lengths, new_tokens, strict=True)
    ]


def alone(program, request):
    session = Session(Recording(program, RunOptions(threads=1)), None, 1)
    [output] = session.generate([request])
    return output, session.executor.margins


def assert_same_where_clear(output, expected, margins):
    """Equal tokens up to the first step where the two best logits are too close to call."""
    for step, (found, wanted) in enumerate(zip(output.token_ids, expected.token_ids, strict=True)):
        if found != wanted:
            assert margins[step] <= CLEAR_MARGIN, f"step {step}: {found} instead of {wanted}, margin {margins[step]}"
            return
    assert output == expected


@pytest.fixture(scope="module")
def expected(rocketkv):
    return [alone(rocketkv, request) for request in requests()]


@pytest.fixture(scope="module")
def executor(rocketkv):
    return OnnxRuntimeExecutor(rocketkv, RunOptions(threads=1))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_answers_do_not_depend_on_batch_or_order_of_joining(executor, expected, data):
    session = Session(executor, None, data.draw(st.integers(2, 4)))
    waiting = list(data.draw(st.permutations(range(len(LENGTHS)))))
    index_of, outputs = {}, {}
    while waiting or session.rows:
        fewest = 0 if session.rows else 1
        joining = [waiting.pop() for _ in range(data.draw(st.integers(fewest, min(session.free, len(waiting)))))]
        index_of.update(zip(session.add([requests()[i] for i in joining]), joining, strict=True))
        for event in session.step():
            if event.output:
                outputs[index_of[event.row]] = event.output
    for index, (output, margins) in enumerate(expected):
        assert_same_where_clear(outputs[index], output, margins)


def test_answers_of_the_test_prompts_differ(expected):
    """Otherwise the tests above could not fail."""
    assert len({output.token_ids[:3] for output, _ in expected}) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "rocketkv"])
def test_rows_of_1_and_4000_tokens_in_one_batch(make_program, policy):
    program = make_program(policy, max_input_len=4000, max_output_len=8, token_budget=128)
    asked = requests((1, 4000, 40), (8, 8, 8))
    outputs = Session(OnnxRuntimeExecutor(program, RunOptions(threads=1)), None, 3).generate(asked)
    for output, request in zip(outputs, asked, strict=True):
        assert_same_where_clear(output, *alone(program, request))
    budget = program.parameters.prompt_budget if policy == "rocketkv" else 4000
    assert [output.physical_lengths[0] for output in outputs] == [8, budget + 7, 47]
    assert [output.logical_length for output in outputs] == [8, 4007, 47]


def test_extend_equals_a_longer_prompt_while_everything_is_kept(make_program):
    """With a full cache a query may be in the prompt or arrive after prefill: the result is the same."""
    program = make_program("full")
    [request] = requests((60,), (6,))
    session = Session(OnnxRuntimeExecutor(program, RunOptions(threads=1)), None, 2)
    split = Request(request.prompt_token_ids[:52], 6, continuation_token_ids=request.prompt_token_ids[52:])
    neighbour = requests((9,), (16,))[0]
    output = session.generate([split, neighbour])[0]
    expected, margins = alone(program, request)
    assert min(margins) > CLEAR_MARGIN
    assert output.token_ids == expected.token_ids
    assert (output.logical_length, output.physical_lengths) == (65, (65, 65, 65))


def test_the_cache_fills_to_its_last_slot_and_not_beyond(rocketkv):
    [request] = requests((256,), (99,))
    [output] = Session(OnnxRuntimeExecutor(rocketkv, RunOptions(threads=1)), None, 1).generate([request])
    assert output.finish_reason == "capacity"
    assert output.physical_lengths == OnnxRuntimeExecutor(rocketkv).limits.capacities
    assert output.logical_length == rocketkv.parameters.max_sequence_len
    assert len(output.token_ids) == 17
