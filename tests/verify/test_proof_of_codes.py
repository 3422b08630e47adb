"""Proofs of engines whose caches have a format: honest ones are true, changed ones are not confirmed."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.verify import engine_run
from kvc_trt.verify.proofs import replay
from kvc_trt.verify.reference_run import reference_run
from tests.stored_tables import FORMATS
from tests.verify.test_proof_replay import lists_at, only_digests, proof_from, swapped, with_lists

POLICIES = ("rocketkv", "snapkv-gqa", "hybrid", "sparq")


@pytest.mark.parametrize("kind", ["digest", "lists"])
@pytest.mark.parametrize(("policy", "form"), list(zip(POLICIES, FORMATS, strict=True)))
def test_an_honest_proof_is_true(policy, form, kind, proving):
    engine = proving(policy, kv_cache=form)
    report = engine.replay(proof_from(engine, kind))
    assert report.passed, (report.problems, report.differences)


@pytest.fixture
def unlike(monkeypatch):
    """Let the reference's own run choose other lists at a step, as it does where a code differs."""

    def with_other_choices(run):
        found = reference_run(run)
        lists = found.choices[0][3]
        lists[0] = swapped(lists[0], 140)
        return found

    monkeypatch.setattr(replay, "reference_run", with_other_choices)


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_where_a_code_differs_the_engine_is_run_again_for_its_codes(kind, unlike, proving):
    engine = proving("rocketkv", kv_cache="int8")
    report = engine.replay(proof_from(engine, kind))
    assert report.passed, (report.problems, report.differences)
    assert report.equal == report.lists - 1


def test_a_changed_choice_of_the_prompt_is_wrong(proving):
    engine = proving("rocketkv", kv_cache="int4")
    honest = proof_from(engine)
    report = engine.replay(with_lists(honest, 1, 0, swapped(lists_at(honest, 1, 0), 200)))
    assert report.problems[0].startswith("cache 1, step 0: ")


def test_a_changed_choice_of_a_step_is_not_confirmed(proving):
    engine = proving("rocketkv", kv_cache="int4")
    honest = proof_from(engine)
    changed = with_lists(honest, 0, 3, swapped(lists_at(honest, 0, 3), 140))
    for proof, reason in ((changed, "another code of a key"), (only_digests(changed), "a proof with lists can")):
        report = engine.replay(proof)
        assert not report.passed
        assert report.problems == ()
        assert report.differences[0].startswith("cache 0, step 3: neither the reference nor the engine")
        assert reason in report.differences[0]


def test_an_engine_that_breaks_the_rule_on_its_own_codes_is_wrong(unlike, proving, monkeypatch):
    """The engine, run again, is judged by what its caches give back: here of other tokens than it read."""
    engine = proving("rocketkv", kv_cache="int4")
    proof = proof_from(engine, "digest")
    read = engine_run.read_caches

    def of_other_tokens(*given):
        keys, values = read(*given)
        return np.roll(keys, 1, axis=2), values

    monkeypatch.setattr(engine_run, "read_caches", of_other_tokens)
    report = engine.replay(proof)
    assert "does not choose by its policy's rule" in report.problems[0]
