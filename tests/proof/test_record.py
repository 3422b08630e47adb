from __future__ import annotations

import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.proof import MadeBy, Recorder
from kvc_trt.proof.lists import decode, digest_at, encode

MADE_BY = MadeBy(*(letter * 64 for letter in "abcd"), "small", "rocketkv, token budget 8", "f32")
KEPT = {0: np.array([[0, 2, 5, -1], [1, 2, 3, -1]]), 2: np.array([[0, 1, 2, 3]])}
READ = [{0: np.array([[0, 2], [1, 3]]), 2: np.array([[step, 9]])} for step in range(4)]


def recorded(kind="digest", kept=KEPT, read=READ):
    recorder = Recorder(MADE_BY, kind)
    recorder.keep(kept)
    for lists in read:
        recorder.step(lists)
    return recorder.proof([1, 2, 3, 4, 5, 6], [7], [8, 9, 8, 9])


def test_it_holds_a_digest_for_every_cache_and_step():
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
def test_what_was_changed_is_named(change, problem):
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


@given(st.integers(1, 60))
def test_digests_take_32_bytes_a_step_however_long_the_lists_are(steps):
    recorder = Recorder(MADE_BY, "digest")
    for _ in range(steps):
        recorder.step({0: np.arange(3000)[None]})
    held = recorder._read[0]
    assert len(held) == 32 * steps
    assert sys.getsizeof(held) < 64 * steps + 200
    assert not recorder._read_lists
