"""The parts of a proof that a worker sends."""

from __future__ import annotations

import pytest

from kvc_trt.errors import InputError
from kvc_trt.proof import document_of
from kvc_trt.runtime import Event, Output
from kvc_trt.serving.dynamo import chunks
from tests.proof.test_record import recorded


def last_of(proof):
    output = Output((1, 2, 3, 4, 5, 6), (8, 9, 8, 9), "", "length", 9, (4, 9), kv_proof=proof)
    return Event(0, 9, "", output)


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_a_proof_comes_with_the_last_chunk(kind):
    chunk = chunks.chunk_of(last_of(recorded(kind)))
    assert chunk["engine_data"]["kvc"]["kv_proof"] == document_of(recorded(kind))
    assert "kv_proof" not in chunks.chunk_of(last_of(None))["engine_data"]["kvc"]


def test_lists_that_no_message_holds_are_refused_and_digests_are_not(monkeypatch):
    monkeypatch.setattr(chunks, "LARGEST_LISTS", 8)
    chunks.chunk_of(last_of(recorded("digest")))
    with pytest.raises(InputError, match="ask for return_kv_proof digest"):
        chunks.chunk_of(last_of(recorded("lists")))
