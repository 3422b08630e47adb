"""Rows record the tokens that their caches keep and read: each its own, in any batch; without a proof, a refusal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.proof.lists import decode
from kvc_trt.runtime import Request, Scheduler, Session, Speculation
from kvc_trt.runtime.session import drafting
from tests.proof.test_record import MADE_BY
from tests.runtime.fake_drafts import FakeDraftExecutor
from tests.runtime.fake_executor import FakeExecutor, FakeGreedyExecutor, FakePacking, FakeTurnExecutor

PROMPTS = [[1, 2, 3], [4] * 40, [5], list(range(20)), [9, 8, 7, 6]]


class FakeLists:
    """The first cache keeps the last tokens; its lists name their positions. A step reads every other slot, and one
    that tells rows apart: the last token stored."""

    made_by = MADE_BY

    def __init__(self, executor):
        self._executor, self._latest = executor, None
        run = executor.prefill

        def prefill(input_ids, prompt_lengths):
            self._latest = run(input_ids, prompt_lengths)
            self._lengths = prompt_lengths
            return self._latest

        executor.prefill = prefill

    def kept(self, row):
        length = int(self._lengths[row])
        return {0: np.arange(max(0, length - self._executor.budget), length)[None]}

    def read(self, row):
        stored = self._executor.buffers[1][row]
        stored = stored[stored >= 0]
        return {1: np.array([[0, 100 + stored[-1] * 100 + len(stored)]])}


def opened(kind=FakeExecutor, rows=3, **options):
    executor = kind()
    return Session(executor, None, rows, lists=FakeLists(executor), **options)


def proven(prompt, **rules):
    return Request(prompt, **{"max_new_tokens": 5, "kv_proof": "lists", **rules})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5), st.integers(1, 3), st.data())
def test_a_row_of_a_batch_records_what_it_does_alone(prompts, rows, data):
    requests = [
        proven(prompt, kv_proof=data.draw(st.sampled_from([None, "digest", "lists"])), max_new_tokens=2 + place)
        for place, prompt in enumerate(prompts)
    ]
    outputs = opened(rows=rows).generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output == opened(rows=1).generate([request])[0]
        assert (output.kv_proof is None) == (request.kv_proof is None)


def test_every_fed_token_is_a_step():
    output = opened().generate([proven([4] * 40, continuation_token_ids=[7, 8])])[0]
    proof = output.kv_proof
    assert proof.fed == (7, 8, *output.token_ids[:-1])
    assert proof.prompt_token_ids == (4,) * 40
    kept, read = proof.caches
    assert decode(kept.kept_lists).tolist() == [list(range(28, 40))]
    assert [int(decode(lists)[0, 1]) for lists in read.read_lists] == [
        100 + token * 100 + 40 + step for step, token in enumerate(proof.fed, start=1)
    ]
    assert list(proof.problems()) == []


def test_rows_that_join_in_slices_and_through_a_scheduler_record_the_same():
    expected = opened().generate([proven([1, 2, 3])])[0]
    with Scheduler(opened()) as scheduler:
        tickets = [scheduler.submit(proven([1, 2, 3])), scheduler.submit(proven([4] * 40))]
        assert tickets[0].result() == expected
        assert tickets[1].result() == opened().generate([proven([4] * 40)])[0]


def test_a_greedy_row_with_a_proof_takes_the_steps_that_report():
    session = opened(FakeGreedyExecutor)
    session.generate([proven([1, 2])])
    assert set(session.executor.asked) == {"logits"}


def test_drafts_are_not_checked_while_a_proof_is_made(monkeypatch):
    monkeypatch.setattr(drafting.Payoff, "affords", lambda self: True)
    monkeypatch.setattr(drafting.Payoff, "pays", lambda self, rows, expected: True)
    session = opened(FakeDraftExecutor, rows=2, speculation=Speculation(None))
    drafted = Request([1, 2, 3] * 5, 9)
    first = session.generate([drafted])[0]
    passes = session.executor.passes
    assert passes > 0
    proof = session.generate([proven([1, 2, 3] * 5, max_new_tokens=9), drafted])
    assert proof[0].token_ids == proof[1].token_ids == first.token_ids
    assert session.executor.passes == passes
    assert len(proof[0].kv_proof.caches[1].read) == 8


def test_a_shared_prefix_is_read_again():
    executor = FakeTurnExecutor()
    session = Session(executor, None, 1, lists=FakeLists(executor), packing=FakePacking(executor), prefix_bytes=1 << 20)
    (row,) = session.add([Request([1, 2, 3, 4], keep_logits=True)])
    session.contexts.share(session.take(row))
    session.remove(row)
    assert session.generate([Request([1, 2, 3, 4, 5], 4)])[0].reused_tokens == 4
    output = session.generate([proven([1, 2, 3, 4, 5])])[0]
    assert output.reused_tokens == 0
    assert decode(output.kv_proof.caches[0].kept_lists).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_a_row_that_goes_on_from_a_context_proves_what_one_row_alone_does(kind):
    """Two sessions: one reads the prompt, and the other answers from the part that was kept."""

    def session():
        executor = FakeTurnExecutor()
        return Session(executor, None, 2, lists=FakeLists(executor), packing=FakePacking(executor))

    alone = session().generate([proven([4] * 20, kv_proof=kind)])[0]
    with Scheduler(session()) as scheduler:
        ticket = scheduler.submit(proven([4] * 20, kv_proof=kind, max_new_tokens=1, keep_context=True))
        record = ticket.result().kv_proof.of_prompt
    going_on = {"context": ticket.context, "context_token_ids": [4] * 20, "kv_proof_prompt": record}
    found = session().generate([proven([], kv_proof=kind, **going_on)])[0]
    assert found.token_ids == alone.token_ids
    assert found.kv_proof == alone.kv_proof


class TestRefusals:
    def test_a_record_of_another_prompt_or_kind_is_refused(self):
        executor = FakeTurnExecutor()
        session = Session(executor, None, 1, lists=FakeLists(executor), packing=FakePacking(executor))
        with Scheduler(session) as scheduler:
            ticket = scheduler.submit(proven([1, 2], max_new_tokens=1, keep_context=True))
            record = ticket.result().kv_proof.of_prompt
        stored = {"context": ticket.context, "kv_proof_prompt": record}
        with pytest.raises(InputError, match="goes with its context and its tokens"):
            session.add([proven([], **stored)])
        with pytest.raises(InputError, match="goes with its context and its tokens"):
            session.add([proven([3], context_token_ids=[1, 2], **stored)])
        with pytest.raises(InputError, match="goes with its context and its tokens"):
            session.add([proven([1, 2], kv_proof_prompt=record)])
        with pytest.raises(InputError, match="are not the 2 tokens"):
            session.add([proven([], context_token_ids=[1, 3], **stored)])
        with pytest.raises(InputError, match="kind digest cannot go on from a record of lists"):
            session.add([proven([], context_token_ids=[1, 2], kv_proof="digest", **stored)])

    def test_a_proof_from_an_engine_opened_without_proofs_is_refused(self):
        with pytest.raises(InputError, match="prompt: a KV proof is asked for") as caught:
            Session(FakeExecutor(), None, 1).generate([proven([1])])
        assert "proofs=True" in caught.value.hint

    def test_requests_that_a_proof_cannot_cover_are_refused(self):
        executor = FakeTurnExecutor()
        session = Session(executor, None, 1, lists=FakeLists(executor), packing=FakePacking(executor))
        with pytest.raises(InputError, match="and no further turns"):
            session.add([proven([1], stay=True)])
        (row,) = session.add([Request([1, 2], keep_logits=True)])
        stored = session.take(row)
        session.remove(row)
        with pytest.raises(InputError, match="a stored context is not read again"):
            session.add([proven([1], context=stored)])
        (row,) = session.add([proven([1, 2])])
        for more in (session.extend, session.turn):
            with pytest.raises(InputError, match="covers a prompt, its continuation and one answer"):
                more(row, [3])
        session.remove(row)
