from __future__ import annotations

import contextlib
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.progress import NullProgress
from kvc_trt.runtime import Request, Sampling, Session
from tests.runtime.fake_executor import FakeExecutor

PROMPTS = [[1, 2, 3], [4] * 40, [5], list(range(20)), [9, 8, 7, 6], [11] * 13]


def alone(request, **options):
    return Session(FakeExecutor(**options), None, 1).generate([request])[0]


def test_a_row_ends_at_max_new_tokens_and_its_last_token_is_not_fed():
    executor = FakeExecutor()
    [output] = Session(executor, None, 1).generate([Request([1, 2, 3], max_new_tokens=5)])
    assert (len(output.token_ids), output.finish_reason, output.text) == (5, "length", None)
    assert output.logical_length == 3 + 4
    assert output.physical_lengths == (7, 7)
    assert executor.runs == 4


def test_max_new_tokens_defaults_to_what_the_engine_has_room_for():
    output = alone(Request([1] * 40))
    assert (len(output.token_ids), output.finish_reason) == (10, "length")
    assert output.logical_length == 49
    assert output.physical_lengths == (21, 49)


def test_a_full_cache_ends_a_row_with_capacity():
    output = alone(Request([1] * 40, max_new_tokens=99))
    assert (len(output.token_ids), output.finish_reason) == (11, "capacity")
    assert output.physical_lengths == (22, 50)


def test_a_short_prompt_goes_on_until_a_cache_is_full():
    output = alone(Request([1], max_new_tokens=99))
    assert (len(output.token_ids), output.finish_reason) == (22, "capacity")
    assert output.physical_lengths == (22, 22)


def test_a_step_is_one_decode_run_for_all_active_rows():
    executor = FakeExecutor()
    session = Session(executor, None, 4)
    session.add([Request(prompt) for prompt in PROMPTS[:3]])
    assert (executor.prefills, executor.runs) == (1, 0)
    for steps in range(1, 6):
        events = session.step()
        assert len(events) == 3
        assert executor.runs == steps
    assert executor.batch_sizes == [3] * 5
    assert session.timings.decode_runs == 5
    assert session.timings.decode_tokens == 15


def test_a_prefill_reports_while_it_runs():
    shown = []

    class Shown(NullProgress):
        @contextlib.contextmanager
        def task(self, description, total):
            shown.append((description, total))
            yield lambda amount: None
            shown.append("done")

    session = Session(FakeExecutor(), None, 4, progress=Shown())
    session.add([Request(prompt) for prompt in PROMPTS[:3]])
    session.step()
    assert shown == [("prefill of 44 tokens", None), "done"]


def test_no_step_runs_when_every_row_is_done():
    executor = FakeExecutor()
    session = Session(executor, None, 2)
    session.add([Request([1], max_new_tokens=1)])
    [event] = session.step()
    assert event.output.finish_reason == "length"
    assert executor.runs == 0
    assert session.step() == []


def test_sample_gives_the_events_before_the_run_and_is_idempotent():
    executor = FakeExecutor()
    session = Session(executor, None, 2)
    session.add([Request([1])])
    assert len(session.sample()) == 1
    assert session.sample() == []
    assert executor.runs == 0
    session.advance()
    assert executor.runs == 1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_answer_does_not_depend_on_neighbours_joining_and_leaving(data):
    requests = [
        Request(prompt, max_new_tokens=3 + 3 * i, sampling=Sampling(temperature=0.8 * (i % 2), seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]
    expected = [Session(FakeExecutor(), None, 1).generate([request])[0] for request in requests]
    session = Session(FakeExecutor(), None, data.draw(st.integers(2, 4)))
    waiting = data.draw(st.permutations(range(len(requests))))
    index_of, outputs = {}, {}
    while waiting or session.rows:
        joining = waiting[: data.draw(st.integers(0 if session.rows else 1, min(session.free, len(waiting)) or 0))]
        waiting = waiting[len(joining) :]
        index_of.update(zip(session.add([requests[i] for i in joining]), joining, strict=True))
        if len(session.rows) > 1 and data.draw(st.booleans()):
            dropped = data.draw(st.sampled_from(session.rows))
            session.remove(dropped)
            waiting = [*waiting, index_of[dropped]]
        for event in session.step():
            if event.output:
                outputs[index_of[event.row]] = event.output
    assert [outputs[i] for i in range(len(requests))] == expected


def test_more_requests_than_rows_are_answered_in_order():
    requests = [Request(prompt, max_new_tokens=4) for prompt in PROMPTS]
    executor = FakeExecutor()
    outputs = Session(executor, None, 2).generate(requests)
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
    assert outputs == [alone(request) for request in requests]
    assert max(executor.batch_sizes) == 2


def test_a_free_row_is_taken_before_the_others_are_done():
    executor = FakeExecutor()
    requests = [Request([1], max_new_tokens=2), Request([2], max_new_tokens=8), Request([3], max_new_tokens=3)]
    Session(executor, None, 2).generate(requests)
    assert executor.batch_sizes == [2, 2, 2, 1, 1, 1, 1]


def test_active_rows_are_the_prefix_and_a_hole_takes_the_last_row():
    executor = FakeExecutor()
    session = Session(executor, None, 4)
    first, second, third = session.add([Request([1]), Request([2]), Request([3])])
    session.remove(first)
    assert session.rows == (third, second)
    assert executor.buffers[0][:3, 0].tolist() == [3, 2, -1]
    [fourth] = session.add([Request([4])])
    assert session.rows == (third, second, fourth)
    assert executor.buffers[0][:3, 0].tolist() == [3, 2, 4]
    session.remove(fourth)
    assert session.rows == (third, second)
    assert session.free == 2


def test_a_prefill_is_freed_once_its_rows_have_joined():
    kept = []

    class Watched(FakeExecutor):
        def prefill(self, *arguments):
            prefilled = super().prefill(*arguments)
            kept.extend(weakref.ref(array) for array in prefilled.state)
            return prefilled

    session = Session(Watched(), None, 2)
    session.add([Request([1]), Request([2])])
    assert len(kept) == 2
    assert [reference() for reference in kept] == [None, None]


class TestExtend:
    def test_queued_tokens_are_fed_before_anything_is_sampled(self):
        session = Session(FakeExecutor(), None, 2)
        [row] = session.add([Request([1, 2])])
        session.extend(row, [7, 8, 9])
        assert [session.step() for _ in range(3)] == [[], [], []]
        assert session.executor.buffers[1][0, :5].tolist() == [1, 2, 7, 8, 9]
        [event] = session.step()
        assert session.executor.buffers[1][0, 5] == event.token_id

    def test_neighbours_of_an_extended_row_go_on_sampling(self):
        expected = alone(Request([5], max_new_tokens=4))
        session = Session(FakeExecutor(), None, 2)
        lagging, free = session.add([Request([1, 2]), Request([5], max_new_tokens=4)])
        session.extend(lagging, [7, 8])
        tokens = [event.token_id for _ in range(4) for event in session.step() if event.row == free]
        assert tuple(tokens) == expected.token_ids

    def test_a_running_row_is_extended_behind_its_own_tokens(self):
        session = Session(FakeExecutor(), None, 1)
        [row] = session.add([Request([1])])
        [first] = session.step()
        session.extend(row, [7])
        session.step()
        assert session.executor.buffers[1][0, :3].tolist() == [1, first.token_id, 7]

    def test_extend_between_sample_and_advance_comes_behind_the_sampled_token(self):
        session = Session(FakeExecutor(), None, 1)
        [row] = session.add([Request([1])])
        [first] = session.sample()
        session.extend(row, [7])
        session.advance()
        session.step()
        assert session.executor.buffers[1][0, :3].tolist() == [1, first.token_id, 7]

    def test_a_continuation_equals_extend(self):
        session = Session(FakeExecutor(), None, 1)
        [row] = session.add([Request([1, 2], max_new_tokens=3)])
        session.extend(row, [7, 8])
        outputs = [event.output for _ in range(5) for event in session.step()]
        assert outputs[-1] == alone(Request([1, 2], max_new_tokens=3, continuation_token_ids=[7, 8]))

    def test_continuations_that_do_not_fit_are_refused_and_not_queued(self):
        session = Session(FakeExecutor(), None, 1)
        [row] = session.add([Request([1] * 40)])
        session.extend(row, [1] * 6)
        with pytest.raises(InputError, match=r"11 tokens do not fit after 40 tokens, found room for 10"):
            session.extend(row, [1] * 5)
        session.extend(row, [1] * 4)
        for _ in range(10):
            assert session.step() == []
        [event] = session.step()
        assert event.output.finish_reason == "capacity"

    def test_extend_refuses_wrong_ids_and_unknown_rows(self):
        session = Session(FakeExecutor(), None, 1)
        [row] = session.add([Request([1])])
        with pytest.raises(InputError, match="row 0: token 1 is 50, expected an id from 0 to 49"):
            session.extend(row, [1, 50])
        with pytest.raises(ValueError, match="row 3 is not in the session"):
            session.extend(3, [1])


class TestBadRequests:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            (Request([]), "prompt 1 is empty, expected 1 to 40 tokens"),
            (Request([1] * 41), "prompt 1 has 41 tokens, expected at most 40"),
            (Request([1, 50]), "token 1 is 50, expected an id from 0 to 49"),
            (Request([-1]), "token 0 is -1"),
            (Request([1, 2.0]), "token 1 is 2.0, expected an integer"),
            (Request([True]), "token 0 is True, expected an integer"),
            (Request(["a"]), "token 0 is 'a', expected an integer"),
            (Request([1], max_new_tokens=0), "max_new_tokens must be at least 1, found 0"),
            (Request([1], stop_strings=["x"]), "stop strings need a tokenizer"),
            (Request([1], continuation_token_ids=[99]), "continuation: token 0 is 99"),
            (Request([1] * 40, continuation_token_ids=[1] * 11), "11 tokens do not fit after 40 tokens"),
        ],
    )
    def test_a_bad_request_is_refused_and_no_row_joins(self, request_, message):
        session = Session(FakeExecutor(), None, 2)
        with pytest.raises(InputError, match=message):
            session.add([Request([1]), request_])
        assert session.rows == ()

    def test_generate_names_the_prompt_before_anything_runs(self):
        executor = FakeExecutor()
        with pytest.raises(InputError, match="prompt 1 is empty"):
            Session(executor, None, 1).generate([Request([1]), Request([])])
        assert executor.prefills == 0

    def test_numpy_integers_are_integers(self):
        assert alone(Request(np.array([1, 2]), max_new_tokens=1)).prompt_token_ids == (1, 2)

    def test_more_rows_than_are_free_are_refused(self):
        session = Session(FakeExecutor(), None, 1)
        with pytest.raises(ValueError, match="2 rows cannot join: 1 of 1 are free"):
            session.add([Request([1])] * 2)

    def test_logits_that_are_not_numbers_are_an_error_and_the_row_can_be_removed(self):
        executor = FakeExecutor()
        executor.poisoned = {40}
        session = Session(executor, None, 2)
        good, bad = session.add([Request([1]), Request([1] * 40)])
        with pytest.raises(InputError, match=f"row {bad}: the engine's logits are not finite after 40 tokens"):
            session.step()
        session.remove(bad)
        assert [event.row for event in session.step()] == [good]


class TestText:
    def test_stop_token_ends_the_row_without_its_text(self, letters):
        free = Session(FakeExecutor(vocab_size=26), letters, 1).generate([Request([1], max_new_tokens=6)])[0]
        stop = free.token_ids[3]
        output = Session(FakeExecutor(vocab_size=26), letters, 1).generate([Request([1], stop_token_ids=[stop])])[0]
        end = free.token_ids.index(stop)
        assert output.finish_reason == "stop"
        assert output.token_ids == free.token_ids[: end + 1]
        assert output.text == letters.decode(free.token_ids[:end])

    def test_the_models_end_token_stops_unless_ignored(self):
        free = alone(Request([1], max_new_tokens=6))
        session = Session(FakeExecutor(), None, 1, end_token_ids=[free.token_ids[0]])
        assert session.generate([Request([1])])[0].finish_reason == "stop"
        assert session.generate([Request([1], max_new_tokens=6, ignore_eos=True)])[0] == free

    @pytest.mark.parametrize("width", [1, 2, 3])
    def test_a_stop_string_may_span_tokens_and_is_never_streamed(self, letters, width):
        free = Session(FakeExecutor(vocab_size=26), letters, 1).generate([Request([1], max_new_tokens=9)])[0]
        stop = free.text[3 : 3 + width]
        pieces = []
        session = Session(FakeExecutor(vocab_size=26), letters, 1)
        [output] = session.generate([Request([1], stop_strings=[stop])], lambda _, event: pieces.append(event.text))
        assert output.finish_reason == "stop"
        assert output.text == "".join(pieces) == free.text[: free.text.index(stop)]
        assert len(output.token_ids) == free.text.index(stop) + width

    def test_held_back_text_is_shown_at_the_end(self, letters):
        free = Session(FakeExecutor(vocab_size=26), letters, 1).generate([Request([1], max_new_tokens=4)])[0]
        [output] = Session(FakeExecutor(vocab_size=26), letters, 1).generate(
            [Request([1], max_new_tokens=4, stop_strings=[free.text[-1] + "never"])]
        )
        assert (output.text, output.finish_reason) == (free.text, "length")


def test_a_failing_callback_leaves_no_rows_behind():
    session = Session(FakeExecutor(), None, 2)

    def fail(index, event):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        session.generate([Request([1]), Request([2])], fail)
    assert session.rows == ()
    assert session.generate([Request([1], max_new_tokens=2)]) == [alone(Request([1], max_new_tokens=2))]


def test_generate_refuses_a_session_with_rows():
    session = Session(FakeExecutor(), None, 2)
    session.add([Request([1])])
    with pytest.raises(InputError, match="idle"):
        session.generate([Request([1])])


def test_seeded_sampling_is_reproducible_and_unseeded_is_not():
    def tokens(seed):
        sampling = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=seed)
        return alone(Request([1], max_new_tokens=20, sampling=sampling)).token_ids

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)
