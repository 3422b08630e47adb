"""The time that a hostile proof takes grows with its bytes, whatever shapes of lists it claims.

Each bound is twenty times what is measured, and a tenth or less of what work by shape would take.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np

from kvc_trt.proof import document_of
from kvc_trt.proof.file import proof_of
from kvc_trt.proof.lists import decode_rows, digest_at
from kvc_trt.proof.record import CacheRecord, root_of
from tests.proof.test_lists import written
from tests.proof.test_record import recorded

SKEWED = written(4000) + written(16_000) + written(0) * (16_000 + 3999)
"""20 KB of one long list and 3,999 empty ones; a table of them takes 256 MB."""


def within(seconds, work):
    started = time.process_time()
    found = work()
    assert time.process_time() - started < seconds
    return found


def with_caches(caches):
    proof = recorded("lists")
    proof = replace(proof, caches=tuple(caches))
    return replace(proof, root=root_of(proof.made_by, proof.prompt_digest, proof.answer_digest, proof.caches))


def test_lists_of_very_different_lengths_are_read_from_a_proof_quickly():
    kept = [CacheRecord(cache, digest_at(cache, 0, SKEWED), (), SKEWED, ()) for cache in range(200)]
    document = json.loads(json.dumps(document_of(with_caches(kept))))
    proof = within(10, lambda: proof_of(document, "it"))
    assert within(2, lambda: list(proof.problems())) == []


def test_rows_of_very_different_lengths_are_read_without_a_table():
    rows = within(2, lambda: decode_rows(SKEWED))
    assert [len(rows[0]), len(rows[1]), len(rows)] == [16_000, 0, 4000]
    assert np.array_equal(rows[0], np.arange(16_000))


def test_the_root_over_many_idle_caches_is_computed_quickly():
    steps = 20_000
    idle = [CacheRecord(cache, bytes(32), ()) for cache in range(4000)]
    caches = (*idle, CacheRecord(4000, None, (bytes(32),) * steps))
    proof = recorded("digest")
    within(4, lambda: root_of(proof.made_by, proof.prompt_digest, proof.answer_digest, caches))


def test_the_root_depends_on_idle_caches_and_on_the_order_of_steps():
    """It is a digest of digests: by step, and within a step by cache."""
    idle, reading = CacheRecord(0, b"k" * 32, ()), CacheRecord(1, None, (b"a" * 32, b"b" * 32))
    proof = recorded("digest")
    first = root_of(proof.made_by, "p", "a", (idle, reading))
    assert first != root_of(proof.made_by, "p", "a", (reading,))
    assert first != root_of(proof.made_by, "p", "a", (idle, replace(reading, read=reading.read[::-1])))
