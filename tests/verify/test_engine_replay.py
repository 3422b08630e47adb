"""No honest answer is called untrue, whatever the policy and the weights; an undecided case gives the reason."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvc_trt import policies
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.verify.proofs import engine_replay, replay
from kvc_trt.verify.rankings.index_lists import IndexComparison
from tests.verify.test_proof_replay import PROMPT, lists_at, only_digests, proof_from, swapped, with_lists

POLICIES = [name for name, *_ in policies.available()]
WITHOUT_PROOFS = {
    "full": "compresses nothing",
    "exact-topk": "oracle",
    "exact-topk-group": "oracle",
    **dict.fromkeys(
        ["duo-attention", "h2o", "sliding-window", "streaming-llm", "tova"], "drops tokens at decode steps"
    ),
}
WEIGHTS = ("fp32", "int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "int4", "keep")))


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in WITHOUT_PROOFS])
def test_an_honest_answer_is_confirmed(policy, weights, proving):
    engine = proving(policy, weights)
    proof = proof_from(engine, max_new_tokens=8)
    for given in (proof, only_digests(proof)):
        report = engine.replay(given)
        assert report.passed, (report.problems, report.differences)
        assert report.choosing > 0
        assert report.equal == report.lists or report.near_ties or report.reproduced == report.lists


@pytest.mark.parametrize("policy", WITHOUT_PROOFS)
def test_a_policy_without_proofs_gives_its_reason(policy, proving):
    with pytest.raises(InputError, match=WITHOUT_PROOFS[policy]):
        proving(policy).session()


@pytest.mark.parametrize("kind", ["digest", "lists"])
@pytest.mark.parametrize(("policy", "weights"), [("rocketkv", "int8"), ("keydiff", "int4"), ("hybrid", "keep")])
def test_a_changed_list_is_named_and_not_confirmed(policy, weights, kind, proving):
    engine = proving(policy, weights)
    proof = proof_from(engine)
    step, stored = (0, 200) if policy != "hybrid" else (2, 202)
    changed = with_lists(proof, 1, step, swapped(lists_at(proof, 1, step), stored))
    report = engine.replay(changed if kind == "lists" else only_digests(changed))
    assert not report.passed
    assert report.differences[0].startswith(f"cache 1, step {step}: neither the reference nor the engine")
    assert "rounds too coarsely" in report.differences[0]
    assert "DIFFERS: cache 1" in report.as_text()
    assert report.to_json()["differences"] == list(report.differences)


def with_pages(lists, page_size):
    """Return the lists with the first page of the first head in place of its neighbour, or the reverse."""
    other, pages = lists.copy(), np.unique(lists[0] // page_size)
    left = np.setdiff1d(np.arange(pages[-1]), pages)
    chosen = np.sort([*pages[1:], left[len(left) // 2]])
    other[0] = (chosen[:, None] * page_size + np.arange(page_size)).flatten()[: lists.shape[1]]
    return other


@pytest.mark.parametrize(
    ("policy", "step"),
    [("sparq", 2), ("quest", 2), ("keydiff", 0), ("expected-attention", 0), ("expected-attention-hybrid", 0)],
)
def test_lists_alone_refute_what_no_rounding_explains(policy, step, proving, monkeypatch):
    """Tries each ranking that is not RocketKV's; the engine is not asked again."""
    engine = proving(policy)
    proof = proof_from(engine)
    monkeypatch.setattr(replay, "replay_by_engine", None)
    lists = lists_at(proof, 1, step)
    if policy == "quest":
        other = with_pages(lists, 16)
    else:
        other = lists.copy()
        left = np.setdiff1d(np.arange(200 if step == 0 else 202), lists[0])
        other[0] = np.sort([*np.delete(lists[0], 10), left[len(left) // 2]])
    report = engine.replay(with_lists(proof, 1, step, other))
    assert report.differences == ()
    assert report.problems[0].startswith(f"cache 1, step {step}: row 0, KV head 0: ")
    assert "float64 scores differ by" in report.problems[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "prompts", "tokens"),
    [("sparq", 12, 12), ("quest", 12, 12), ("keydiff", 12, 1), ("expected-attention", 60, 1)],
)
def test_lists_alone_prove_near_ties(policy, prompts, tokens, proving, monkeypatch):
    """In fp16 the reference chooses differently at times; every such difference is rounding, and is proven to be."""
    engine = proving(policy, "fp16")
    proofs = [proof_from(engine, "lists", PROMPT[first:], max_new_tokens=tokens) for first in range(prompts)]
    monkeypatch.setattr(replay, "replay_by_engine", None)
    reports = [engine.replay(proof) for proof in proofs]
    assert [report.problems for report in reports if not report.passed] == []
    assert any(report.near_ties for report in reports)


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_impossible_choices_are_wrong_in_coarse_engines_too(kind, proving):
    """A cache that keeps all of its prompt: no rounding does that."""
    engine = proving("rocketkv", "int4")
    everything = with_lists(proof_from(engine), 0, 0, np.tile(np.arange(len(PROMPT)), (2, 1)))
    report = engine.replay(everything if kind == "lists" else only_digests(everything))
    assert "all 200 tokens were taken" in report.problems[0]


@pytest.fixture(scope="module")
def coarse(proving):
    return proving("rocketkv", "int8")


def test_rows_of_a_batch_are_confirmed_by_a_run_of_each_alone(coarse):
    prompts = [PROMPT[:140], PROMPT, PROMPT[30:]]
    outputs = coarse.generate(prompts, max_new_tokens=8, ignore_eos=True, kv_proof="digest")
    assert all(coarse.replay(output.kv_proof).passed for output in outputs)


def test_an_engine_that_cannot_run_here_refutes_no_proof(coarse, monkeypatch):
    proof = proof_from(coarse, max_new_tokens=12)
    assert coarse.replay(proof).equal < coarse.replay(proof).lists, "there is something to decide"

    def missing(*arguments):
        raise UnsupportedEnvironment("TensorRT is not installed")

    monkeypatch.setattr(engine_replay, "harness_for", missing)
    report = coarse.replay(proof)
    assert (report.passed, report.problems) == (False, ())
    assert "the engine cannot be run again here: TensorRT is not installed" in report.differences[0]


def test_an_engine_that_breaks_its_rule_confirms_nothing(coarse, monkeypatch):
    """The engine gives its lists again, which are not the policy's on the inputs of its operators."""
    run_again = replay.replay_by_engine

    def broken(engine, proof):
        found = run_again(engine, proof)
        return dataclasses.replace(found, judged=IndexComparison(1, wrong=("row 0, KV head 1: it read another",)))

    monkeypatch.setattr(replay, "replay_by_engine", broken)
    report = coarse.replay(proof_from(coarse, max_new_tokens=12))
    assert report.problems == ("the engine does not choose by its policy's rule: row 0, KV head 1: it read another",)


def test_digests_of_lists_that_come_again_are_judged_like_lists(proving, monkeypatch):
    """In fp16 the reference differs at near-ties: the engine gives the lists, which are proven on the reference."""
    engine = proving("rocketkv", "fp16")
    proofs = [proof_from(engine, "digest", PROMPT[first:], max_new_tokens=12) for first in range(6)]
    reports = [engine.replay(proof) for proof in proofs]
    assert all(report.passed for report in reports)
    tied = next(at for at, report in enumerate(reports) if report.near_ties)
    assert reports[tied].reproduced == reports[tied].lists
    strict = replay.thresholds_for("fp32")
    monkeypatch.setattr(replay, "thresholds_for", lambda *given: dataclasses.replace(strict, choice_slack=1e-9))
    assert "float64 scores differ" in engine.replay(proofs[tied]).problems[0]


def test_in_half_precision_the_bound_alone_refutes_nothing(proving, monkeypatch):
    """A list that it does not explain is wrong only if the engine, run again, does not choose it either."""
    engine = proving("rocketkv", "fp16")
    proofs = [proof_from(engine, "lists", PROMPT[first:], max_new_tokens=12) for first in range(6)]
    tied = next(proof for proof in proofs if engine.replay(proof).near_ties)
    strict = replay.thresholds_for("fp32")
    slack = {"fp32": 1e-9, "fp16": 1e-6}
    monkeypatch.setattr(
        replay, "thresholds_for", lambda kind, *_: dataclasses.replace(strict, choice_slack=slack[kind])
    )
    for proof in (tied, only_digests(tied)):
        report = engine.replay(proof)
        assert report.passed, report.problems
        assert report.reproduced == report.lists
    changed = with_lists(tied, 1, 0, swapped(lists_at(tied, 1, 0), len(tied.prompt_token_ids)))
    assert any(problem.startswith("cache 1, step 0: row 0") for problem in engine.replay(changed).problems)
