"""Caches that have a format: codes are stored and move as they are, so a row goes on as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.contexts import read_context, write_context
from kvc_trt.contexts.handoff import check_handoff, largest_handoff, write_handoff
from kvc_trt.contexts.header import ContextHeader, header_of
from kvc_trt.errors import HandoffRefused, InputError
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.runtime import Request, Scheduler
from kvc_trt.runtime.context import NO_TOKENS, extended_digest
from kvc_trt.runtime.session.context_store import ContextStore
from tests.contexts.conftest import packing_without_graphs, random_context
from tests.contexts.test_continuing import OTHER, PROMPT, session_of, state_of, steps, through_a_file
from tests.every_format import DIFFERENT, in_formats
from tests.every_policy import EVERY
from tests.runtime.scheduling import finish
from tests.stored_tables import FORMATS

POLICIES = (*EVERY, "rocketkv, bounds in fp8", "quest, bounds in fp8")


def taken(session):
    """Return the context of PROMPT."""
    (row,) = session.add([Request(PROMPT, 1)])
    context = session.take(row)
    session.remove(row)
    return context


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(POLICIES))
def test_a_row_that_was_stored_goes_on_bit_for_bit(policy, form, make_program, tmp_path):
    """After a prompt, in an answer and after a turn: steps and turns read what they would have read."""
    program = make_program(policy, turns=True, kv_cache=form)
    running, restored = session_of(program), session_of(program)
    (row,) = running.add([Request(PROMPT, 16, ignore_eos=True)])

    def goes_on():
        context = running.take(row)
        expected = steps(running, 3)
        for one in restored.rows:
            restored.remove(one)
        stored = through_a_file(context, program, tmp_path)
        (again,) = restored.add([Request([], 16, context=stored, ignore_eos=True)])
        found = steps(restored, 3)
        assert [seen[again] for seen in found] == [seen[row] for seen in expected]
        assert state_of(restored, again) == state_of(running, row)
        return again

    for turn in (OTHER[:20], OTHER[20:25]):
        again = goes_on()
        for session, one in ((running, row), (restored, again)):
            session.turn(one, turn, 6)
    goes_on()


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(POLICIES, 1, DIFFERENT))
def test_two_prompts_share_a_prefix_as_it_was_stored(policy, form, make_program):
    """Both go on from the same codes, beside each other, as each does after the context alone."""
    program = make_program(policy, turns=True, kv_cache=form)
    session = session_of(program, rows=2, prefix_bytes=1 << 30)
    prefix = taken(session)
    rests = OTHER[:4], OTHER[4:9]
    alone = [session.generate([Request(rest, 5, context=prefix, ignore_eos=True)])[0] for rest in rests]
    session.contexts.share(prefix)
    shared = session.generate([Request([*PROMPT, *rest], 5, ignore_eos=True) for rest in rests])
    assert [output.token_ids for output in shared] == [output.token_ids for output in alone]
    assert [output.physical_lengths for output in shared] == [output.physical_lengths for output in alone]
    assert [output.reused_tokens for output in shared] == [200, 200]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(POLICIES, 2, DIFFERENT))
def test_a_scheduler_answers_several_as_each_alone(policy, form, make_program):
    """Prompts in slices, rows that join and leave, one that starts from a context, and a conversation that waits."""
    program = make_program(policy, turns=True, kv_cache=form)
    context = taken(session_of(program))
    requests = [
        Request(PROMPT, 6, ignore_eos=True),
        Request(OTHER, 3, ignore_eos=True, stay=True),
        Request(PROMPT[:50], 5, ignore_eos=True),
        Request(OTHER[:5], 4, context=context, ignore_eos=True),
    ]
    turn = PROMPT[60:70]

    def answers(rows, order):
        scheduler = Scheduler(session_of(program, rows=rows), prefill_slice_ms=1e-6)
        tickets = {}
        for number in order:
            tickets[number] = scheduler.submit(requests[number])
            if rows == 1:
                finish(scheduler)
        finish(scheduler)
        tickets["turn"] = scheduler.ask(tickets[1], turn, max_new_tokens=4)
        finish(scheduler)
        scheduler.close()
        return {name: ticket.result(0).token_ids for name, ticket in tickets.items()}

    assert answers(4, range(4)) == answers(1, (0, 2, 3, 1))


REFUSED = [(one, other) for one in (AUTO, *FORMATS) for other in (AUTO, *FORMATS) if one != other]


@pytest.mark.parametrize(("mine", "found"), REFUSED)
def test_a_context_in_another_format_is_refused_naming_both_formats(mine, found, tmp_path):
    """Covers a file, a prefix and a handoff, each before its state is read."""
    packing, tokens = packing_of_format(mine), range(20)
    context = random_context(packing_of_format(found), 20, 0)
    said = f"has keys and values in format {found}; this engine has {mine}"
    write_context(tmp_path / "context", context)
    with pytest.raises(InputError, match=f"context {said}$") as caught:
        read_context(tmp_path / "context", packing)
    assert f"--kv-cache {found}" in caught.value.hint
    with pytest.raises(InputError, match=f"the context {said}$"):
        ContextStore(packing, 1 << 30, packing.limits, turns=True).share(context)
    content = np.zeros(largest_handoff(packing_of_format(found)), np.uint8)
    handoff = write_handoff(context, packing_of_format(found), content)
    with pytest.raises(HandoffRefused, match=f"the handoff {said}$"):
        check_handoff(handoff, packing, tokens)


def packing_of_format(form):
    """Return the packing of an engine whose digests differ from those of other formats."""
    packing = packing_without_graphs("rocketkv", kv_cache=form)
    digest = extended_digest(NO_TOKENS, form.encode())
    packing._fingerprint = replace(packing.fingerprint, parameters=digest, state=digest)
    return packing


def test_a_document_that_says_another_format_than_its_tensors_is_refused():
    packing = packing_without_graphs("rocketkv", kv_cache="int8")
    for lying in (
        replace(packing.fingerprint, kv_cache=AUTO),
        replace(packing.fingerprint, kv_cache=AUTO, policy_name="another"),
    ):
        with pytest.raises(InputError, match="in format auto; this engine has int8"):
            lying.check_same(packing.fingerprint, "it")


def test_a_document_of_auto_names_no_format():
    """Earlier versions know no such key, and their files have none."""
    auto, other = (header_of(random_context(packing_of_format(form), 9, 0)) for form in (AUTO, "int4"))
    assert "kv_cache" not in auto.model_dump()
    assert "kv_cache" not in auto.model_dump_json()
    assert '"kv_cache":"int4"' in other.model_dump_json()
    assert ContextHeader(**auto.model_dump()) == auto
    assert ContextHeader(**other.model_dump()).fingerprint == other.fingerprint
