"""A replay confirms an honest proof, and names the change in any other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvc_trt import Engine, build
from kvc_trt.errors import InputError
from kvc_trt.proof import read_proof, write_proof
from kvc_trt.proof.lists import decode, digest_at, encode
from kvc_trt.proof.record import answer_digest, prompt_digest, root_of
from kvc_trt.verify.proofs import replay
from kvc_trt.verify.thresholds import thresholds_for

PROMPT = np.random.default_rng(0).integers(3, 40, 200).tolist()
ANSWER = 6


@pytest.fixture(scope="module")
def engine(proving):
    return proving()


def proof_from(engine, kind="lists", prompt=PROMPT, **rules):
    return engine.generate(prompt, **{"max_new_tokens": ANSWER, "ignore_eos": True, "kv_proof": kind, **rules}).kv_proof


@pytest.fixture(scope="module")
def honest(engine):
    return proof_from(engine)


def resealed(proof, **changes):
    """Return a changed proof whose digests of tokens and root were made again, by somebody who knows the format."""
    changed = dataclasses.replace(proof, **changes)
    prompt = prompt_digest(changed.prompt_token_ids)
    answer = answer_digest(changed.continuation_token_ids, changed.answer_token_ids)
    root = root_of(changed.made_by, prompt, answer, changed.caches)
    return dataclasses.replace(changed, prompt_digest=prompt, answer_digest=answer, root=root)


def with_lists(proof, cache, step, lists):
    """Return the proof with other lists of a cache at a step, their digest, and a new root."""
    data = encode(lists)
    digest, (record, *_) = digest_at(cache, step, data), [one for one in proof.caches if one.cache == cache]
    if step == 0:
        other = dataclasses.replace(record, kept=digest, kept_lists=data)
    else:
        read, all_lists = list(record.read), list(record.read_lists)
        read[step - 1], all_lists[step - 1] = digest, data
        other = dataclasses.replace(record, read=tuple(read), read_lists=tuple(all_lists))
    return resealed(proof, caches=tuple(other if one.cache == cache else one for one in proof.caches))


def only_digests(proof):
    bare = tuple(dataclasses.replace(one, kept_lists=None, read_lists=None) for one in proof.caches)
    return dataclasses.replace(proof, kind="digest", caches=bare)


def lists_at(proof, cache, step):
    record = proof.caches[cache]
    return decode(record.kept_lists if step == 0 else record.read_lists[step - 1])


def swapped(lists, available):
    """Return the lists with one token of the first head in place of another."""
    other = lists.copy()
    missing = np.setdiff1d(np.arange(available), lists[0])
    row = np.sort(np.append(lists[0][1:], missing[len(missing) // 2]))
    other[0] = row
    return other


@pytest.mark.parametrize(
    ("policy", "caches_that_choose"),
    [("rocketkv", 12), ("snapkv-gqa", 2), ("hybrid", 10), ("keydiff", 2), ("sparq", 10), ("rocketkv-mt", 12)],
)
@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_an_honest_proof_is_true(policy, caches_that_choose, kind, proving, tmp_path):
    engine = proving(policy)
    plain = Engine.open(engine.path).generate(PROMPT, max_new_tokens=ANSWER, ignore_eos=True)
    output = engine.generate(PROMPT, max_new_tokens=ANSWER, ignore_eos=True, kv_proof=kind)
    assert output.token_ids == plain.token_ids
    write_proof(tmp_path / "proof.json", output.kv_proof)
    report = engine.replay(tmp_path / "proof.json")
    assert report.passed, report.problems
    assert report.equal == report.lists
    assert report.choosing == caches_that_choose
    assert report.to_json()["passed"] is True


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_other_executors_give_the_same_proof(backend, engine, honest):
    if backend == "openvino":
        pytest.importorskip("openvino")
    other = proof_from(Engine.open(engine.path, backend=backend, proofs=True))
    assert other.root == honest.root


def test_an_answer_within_the_budget_says_that_nothing_was_compressed(engine):
    report = engine.replay(proof_from(engine, prompt=PROMPT[:20]))
    assert report.passed
    assert report.choosing == 0
    assert "nothing was compressed" in report.as_text()


def test_continuations_and_batches_are_covered(engine):
    proofs = [output.kv_proof for output in engine.generate([PROMPT, PROMPT[:90]], max_new_tokens=3, kv_proof="digest")]
    for proof in proofs:
        assert engine.replay(proof).passed
    from kvc_trt.runtime import Request

    request = Request(PROMPT, 3, continuation_token_ids=[5, 6, 7], kv_proof="lists", ignore_eos=True)
    (output,) = engine.session().generate([request])
    assert len(output.kv_proof.fed) == 5
    assert engine.replay(output.kv_proof).passed


def test_one_token_is_a_proof_of_the_prompt_alone(engine):
    proof = proof_from(engine, max_new_tokens=1)
    assert proof.fed == ()
    assert engine.replay(proof).lists == 2


class TestChanged:
    """Each with digests alone and, where it has lists, with lists."""

    @pytest.mark.parametrize(("cache", "step"), [(0, 0), (1, 0), (0, 3), (1, ANSWER - 1)])
    def test_a_swapped_list_fails_replay(self, cache, step, engine, honest):
        available = 200 if step == 0 else 123 + step
        changed = with_lists(honest, cache, step, swapped(lists_at(honest, cache, step), available))
        assert list(changed.problems()) == []
        report = engine.replay(changed)
        assert not report.passed
        assert report.problems[0].startswith(f"cache {cache}, step {step}: ")
        assert "float64 scores differ" in report.problems[0] or "not give its lowest" in report.problems[0]
        digests = engine.replay(only_digests(changed))
        assert digests.problems == ()
        assert digests.differences[0].startswith(f"cache {cache}, step {step}: neither the reference nor the engine")
        assert "a proof with lists can" in digests.differences[0]

    def test_a_changed_digest_is_named_by_cache_and_step(self, engine, honest):
        proof = only_digests(honest)
        first, second = proof.caches
        read = (*first.read[:2], bytes(32), *first.read[3:])
        changed = dataclasses.replace(proof, caches=(dataclasses.replace(first, read=read), second))
        report = engine.replay(changed)
        assert "the root is not that of" in report.problems[0]
        assert report.differences[0].startswith("cache 0, step 3: ")
        again = engine.replay(resealed(changed))
        assert (again.passed, again.problems, again.differences) == (False, (), report.differences)

    def test_a_digest_that_is_not_that_of_its_lists_is_named(self, engine, honest):
        first, second = honest.caches
        changed = dataclasses.replace(honest, caches=(first, dataclasses.replace(second, kept=bytes(32))))
        report = engine.replay(changed)
        assert "cache 1, step 0: the lists are not those of the digest" in report.problems

    def test_swapped_steps_are_named(self, engine, honest):
        first, second = only_digests(honest).caches
        changed = dataclasses.replace(first, read=(first.read[1], first.read[0], *first.read[2:]))
        report = engine.replay(resealed(only_digests(honest), caches=(changed, second)))
        assert report.differences[0].startswith("cache 0, step 1: ")

    def test_changed_tokens_fail_replay(self, engine, honest):
        prompt = (*honest.prompt_token_ids[:150], 41, *honest.prompt_token_ids[151:])
        changed = dataclasses.replace(honest, prompt_token_ids=prompt)
        assert "prompt_token_ids are not those" in engine.replay(changed).problems[0]
        assert not engine.replay(resealed(honest, prompt_token_ids=prompt)).passed
        answer = (honest.answer_token_ids[0], 41, *honest.answer_token_ids[2:])
        changed = dataclasses.replace(honest, answer_token_ids=answer)
        assert "answer_token_ids are not those" in engine.replay(changed).problems[0]
        report = engine.replay(resealed(honest, answer_token_ids=answer))
        assert report.problems[0].startswith("cache 0, step 2: ")

    def test_a_changed_root_fails_replay(self, engine, honest):
        report = engine.replay(dataclasses.replace(honest, root="0" * 64))
        assert report.problems == ("the root is not that of engine, policy, tokens and digests",)
        assert report.equal == report.lists

    def test_a_proof_of_another_engine_is_reported(self, engine, honest):
        made_by = dataclasses.replace(honest.made_by, engine="0" * 64)
        assert "the root" in engine.replay(dataclasses.replace(honest, made_by=made_by)).problems[0]
        report = engine.replay(resealed(honest, made_by=made_by))
        assert report.passed
        assert report.other_engine
        assert "another engine of the same weights and policy answered" in report.as_text()

    @pytest.mark.parametrize("name", ["policy", "model", "weights"])
    def test_a_proof_of_another_policy_model_or_weights_is_refused(self, name, engine, honest):
        made_by = dataclasses.replace(honest.made_by, **{name: "0" * 64})
        with pytest.raises(InputError, match=f"of another engine .*: its {name} digest is 000000000000, expected "):
            engine.replay(resealed(honest, made_by=made_by))

    def test_a_proof_without_one_of_the_caches_is_refused(self, engine, honest):
        with pytest.raises(InputError, match="do not say what cache 1 keeps"):
            engine.replay(resealed(honest, caches=honest.caches[:1]))
        bare = tuple(dataclasses.replace(one, read=(), read_lists=()) for one in honest.caches)
        with pytest.raises(InputError, match="do not say what steps read of cache 0"):
            engine.replay(resealed(honest, caches=bare))

    def test_a_proof_with_an_unknown_cache_is_refused(self, engine, honest):
        other = dataclasses.replace(honest.caches[1], cache=2)
        with pytest.raises(InputError, match="cache 2 is none of the engine's 2"):
            engine.replay(resealed(honest, caches=(*honest.caches, other)))

    def test_proofs_that_the_engine_cannot_read_are_refused(self, engine, honest):
        with pytest.raises(InputError, match="token 0 is 50, expected an id from 0 to 49"):
            engine.replay(resealed(honest, prompt_token_ids=(50,)))
        with pytest.raises(InputError, match="270 prompt tokens and 275 in all, expected at most 256 and"):
            engine.replay(resealed(honest, prompt_token_ids=(3,) * 270))
        with pytest.raises(InputError, match="prompt has 400 tokens, expected at most 288"):
            engine.replay(resealed(honest, prompt_token_ids=(3,) * 400))

    @pytest.mark.parametrize(
        ("lists", "problem"),
        [
            (np.arange(123)[None], "lists of 1 heads, expected 2"),
            (np.tile(np.arange(122), (2, 1)), "head 0: 122 tokens were taken, expected 123"),
            (np.tile(np.arange(200), (2, 1)), "head 0: all 200 tokens were taken, expected 123"),
            (np.tile(np.arange(78, 201), (2, 1)), "names tokens that are not there"),
            (np.tile(np.arange(123)[::-1], (2, 1)), "does not ascend"),
        ],
    )
    def test_impossible_lists_are_named_by_cache_and_step(self, lists, problem, engine, honest):
        report = engine.replay(with_lists(honest, 0, 0, lists))
        assert report.problems[0].startswith("cache 0, step 0")
        assert problem in report.problems[0]


@pytest.mark.parametrize("lists", [np.full((1, 4), 2**31 - 2), np.tile(np.arange(10**6, 10**6 + 123), (2, 1))])
def test_lists_that_cannot_be_are_named_beside_a_true_digest_too(lists, engine, honest):
    """Another list differs, so that all of them would be forced on the reference."""
    other = with_lists(honest, 1, 2, swapped(lists_at(honest, 1, 2), 125))
    first = dataclasses.replace(other.caches[0], kept_lists=encode(lists))
    report = engine.replay(dataclasses.replace(other, caches=(first, other.caches[1])))
    assert "cache 0, step 0: the lists are not those of the digest" in report.problems
    named = [problem for problem in report.problems if problem.startswith("cache 0, step 0")]
    assert len(named) == 2
    assert "expected 2" in named[1] or "not there" in named[1]


def test_a_policy_that_does_nothing_is_named_by_its_digest(engine, honest):
    everything = with_lists(honest, 1, 2, np.tile(np.arange(125), (2, 1)))
    report = engine.replay(only_digests(everything))
    assert report.problems == ("cache 1, step 2: all 125 tokens were taken, where rocketkv chooses",)


def test_differences_within_rounding_are_near_ties(engine, honest, monkeypatch):
    """With a tolerance that admits the swap, the same proof is true, and the swap is counted."""
    lists = lists_at(honest, 0, 0)
    missing = np.setdiff1d(np.arange(160), lists[0])[0]
    above = np.searchsorted(lists[0], missing)  # a lower index in place of a higher one breaks no tie
    other = lists.copy()
    other[0] = np.sort(np.append(np.delete(lists[0], above), missing))
    changed = with_lists(honest, 0, 0, other)
    assert not engine.replay(changed).passed

    def wide(weights, prefill):
        return dataclasses.replace(thresholds_for(weights, prefill), choice_slack=1e9)

    monkeypatch.setattr(replay, "thresholds_for", wide)
    report = engine.replay(changed)
    assert report.passed, report.problems
    assert report.near_ties >= 1
    assert report.equal < report.lists


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("full", "compresses nothing"),
        ("h2o", "drops tokens at decode steps, and no list says which ones"),
        ("streaming-llm", "drops tokens at decode steps"),
    ],
)
def test_policies_without_a_proof_say_why(policy, reason, proving):
    with pytest.raises(InputError, match=reason):
        proving(policy).session()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_proof_of_a_real_model_is_true(smollm2_gguf, tmp_path):
    directory = tmp_path / "engine"
    build(
        "smollm2-135m-instruct", checkpoint=str(smollm2_gguf), policy="rocketkv", token_budget=128,
        max_input_len=512, max_output_len=64, weights="fp32", verify=False, output=directory,
    )  # fmt: skip
    engine = Engine.open(directory, proofs=True)
    words = "The quick brown fox jumps over the lazy dog, and the code of the day is 7319. " * 15
    prompt = engine.chat_prompt(f"{words[:1200]}\n\nWhat is the code of the day?")
    output = engine.generate(prompt, max_new_tokens=6, kv_proof="lists")
    write_proof(tmp_path / "proof.json", output.kv_proof)
    report = engine.replay(tmp_path / "proof.json")
    assert report.passed, report.problems
    assert report.lists == 30 * len(output.token_ids)
    assert report.choosing >= report.lists - 30
    proof = read_proof(tmp_path / "proof.json")
    lists = decode(proof.caches[7].read_lists[2])
    stored = output.physical_lengths[7] - len(output.token_ids) + 1
    report = engine.replay(with_lists(proof, 7, 3, swapped(lists, stored)))
    assert report.problems[0].startswith("cache 7, step 3: ")
