from __future__ import annotations

import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.proof import MadeBy, Recorder
from kvc_trt.proof.lists import decode, digest_at, encode
from kvc_trt.proof.record import proof_kind

MADE_BY = MadeBy(*(letter * 64 for letter in "abcd"), "small", "rocketkv, token budget 8", "f32")
KEPT = {0: np.array([[0, 2, 5, -1], [1, 2, 3, -1]]), 2: np.array([[0, 1, 2, 3]])}
READ = [{0: np.array([[0, 2], [1, 3]]), 2: np.array([[step, 9]])} for step in range(4)]


def recorded(kind="digest", kept=KEPT, read=READ):
    recorder = Recorder(MADE_BY, kind)
    recorder.keep(kept)
    for lists in read:
        recorder.step(lists)
    return recorder.proof([1, 2, 3, 4, 5, 6], [7], [8, 9, 8, 9])


def test_a_proof_holds_a_digest_for_every_cache_and_step():
    proof = recorded()
    assert proof.fed == (7, 8, 9, 8)
    assert [record.cache for record in proof.caches] == [0, 2]
    for record in proof.caches:
        assert record.kept == digest_at(record.cache, 0, encode(KEPT[record.cache]))
        assert record.read == tuple(
            digest_at(record.cache, step, encode(lists[record.cache])) for step, lists in enumerate(READ, start=1)
        )
    assert list(proof.problems()) == []


def test_lists_are_added_under_the_same_root():
    digests, lists = recorded("digest"), recorded("lists")
    assert digests.root == lists.root
    assert digests.caches[0].kept_lists is digests.caches[0].read_lists is None
    assert decode(lists.caches[0].kept_lists).tolist() == [[0, 2, 5], [1, 2, 3]]
    assert decode(lists.caches[1].read_lists[3]).tolist() == [[3, 9]]
    assert list(lists.problems()) == []


def test_the_root_is_over_everything_that_is_stated():
    proof = recorded()
    roots = {proof.root}
    for field in fields(MadeBy):
        other = replace(proof.made_by, **{field.name: "other"})
        assert "the root" in next(replace(proof, made_by=other).problems())
    for change in (
        {"kept": KEPT | {0: KEPT[0] + 1}},
        {"kept": {0: KEPT[0]}},
        {"read": READ[:-1]},
        {"read": [READ[1], READ[0], *READ[2:]]},
        {"read": [{0: lists[0]} for lists in READ]},
    ):
        roots.add(recorded(**change).root)
    assert len(roots) == 6


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt_token_ids": (1, 2, 3, 4, 5, 7)}, "prompt_token_ids are not those of prompt_digest"),
        ({"answer_token_ids": (8, 9, 8, 7)}, "answer_token_ids are not those of answer_digest"),
        ({"continuation_token_ids": (6,)}, "answer_token_ids are not those of answer_digest"),
        ({"prompt_digest": "0" * 64}, "prompt_token_ids are not those of prompt_digest"),
        ({"root": "0" * 64}, "the root is not that of"),
    ],
)
def test_changed_parts_of_a_proof_are_named(change, problem):
    assert problem in " ".join(replace(recorded(), **change).problems())


def test_lists_that_are_not_those_of_their_digests_are_named():
    proof = recorded("lists")
    first, second = proof.caches
    lists = (*second.read_lists[:2], encode(np.array([[5, 6]])), second.read_lists[3])
    changed = replace(proof, caches=(first, replace(second, read_lists=lists)))
    assert list(changed.problems()) == ["cache 2, step 3: the lists are not those of the digest"]
    kept = replace(first, kept_lists=encode(np.array([[0]])))
    assert list(replace(proof, caches=(kept, second)).problems()) == [
        "cache 0, step 0: the lists are not those of the digest"
    ]


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_a_row_that_goes_on_after_a_prompt_makes_the_same_proof(kind):
    """One has read the prompt, in another precision, and has drawn one token; the other has answered."""
    reader = Recorder(replace(MADE_BY, engine="e" * 64, prefill_precision="bf16"), kind)
    reader.keep(KEPT)
    record = reader.proof([1, 2, 3, 4, 5, 6], [], [8]).of_prompt
    answering = Recorder(MADE_BY, kind, record)
    for lists in READ:
        answering.step(lists)
    found, alone = answering.proof([1, 2, 3, 4, 5, 6], [7], [8, 9, 8, 9]), recorded(kind)
    assert found.caches == alone.caches
    assert found.made_by == replace(MADE_BY, prefill_precision="bf16")
    assert list(found.problems()) == []


def test_the_record_of_a_prompt_leaves_out_what_was_read_after_it():
    record = recorded("lists").of_prompt
    assert [(one.cache, one.read, one.read_lists) for one in record.caches] == [(0, (), ()), (2, (), ())]
    assert recorded("lists", kept={}).of_prompt.caches == ()


@pytest.mark.parametrize(("asked", "kind"), [("digest", "digest"), ("lists", "lists"), (None, None), ("", None)])
def test_proof_kinds_are_found_by_name(asked, kind):
    assert proof_kind(asked, "it") == kind


@pytest.mark.parametrize("asked", ["Digest", "all", 1, True, 0, ["lists"], {}])
def test_unknown_proof_kinds_are_refused(asked):
    with pytest.raises(InputError, match="expected digest or lists"):
        proof_kind(asked, "it")


@given(st.integers(1, 60))
def test_digests_take_32_bytes_a_step_however_long_the_lists_are(steps):
    recorder = Recorder(MADE_BY, "digest")
    for _ in range(steps):
        recorder.step({0: np.arange(3000)[None]})
    held = recorder._read[0]
    assert len(held) == 32 * steps
    assert sys.getsizeof(held) < 64 * steps + 200
    assert not recorder._read_lists
