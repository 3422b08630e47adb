"""Data that leaves an engine and comes back: stored contexts, handoffs between processes, KV proofs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvc_trt.contexts.file import CHECKSUM, DOCUMENT, UNSEALED, inspect_context, read_context, write_context
from kvc_trt.contexts.handoff import check_handoff, largest_handoff, read_handoff, write_handoff
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.proof import document_of, read_proof, write_proof
from kvc_trt.proof.file import prompt_document_of, prompt_record_of
from kvc_trt.proof.lists import encode
from kvc_trt.proof.record import PromptRecord
from kvc_trt.runtime.context import NO_TOKENS, Context, extended_digest
from kvc_trt.serving.dynamo.handoff.handing_over import OFFER, offer_of
from kvc_trt.serving.dynamo.handoff.transfer import Offer
from tests.contexts.conftest import packing_without_graphs, random_context
from tests.fuzz.kind import Kind
from tests.fuzz.mutation.containers import SAFETENSORS, header_and_data, packed
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import JSON, Codec, of_trees
from tests.proof.test_record import recorded

PACKINGS = {form: packing_without_graphs("rocketkv", kv_cache=form) for form in CACHE_FORMATS}
PACKING = PACKINGS[AUTO]
TOKENS = list(range(20))


def _context(seed: int, length: int = 20) -> Context:
    context = random_context(PACKING, length, seed=seed)
    tensors = {name: np.zeros_like(array) if seed else array for name, array in context.tensors.items()}
    return replace(context, tensors=tensors, token_digest=extended_digest(NO_TOKENS, range(length)))


def sealed(content: bytes) -> bytes:
    """Return the file of a context with the checksum of its bytes, wherever that is written."""
    try:
        header = header_and_data(content)[0]
        written = header["__metadata__"][CHECKSUM]
        unsealed = content.replace(f'"{CHECKSUM}":"{written}"'.encode(), f'"{CHECKSUM}":"{UNSEALED}"'.encode(), 1)
    except (ValueError, LookupError, TypeError, RecursionError):
        return content
    digest = hashlib.sha256(unsealed).hexdigest()
    return unsealed.replace(UNSEALED.encode(), digest.encode(), 1)


def _repacked(header: Any, data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return sealed(len(text).to_bytes(8, "little") + text + data)


RESEALED = Codec(
    lambda content: header_and_data(content)[0], lambda header, content: _repacked(header, header_and_data(content)[1])
)


def _document_of(content: bytes) -> Any:
    return json.loads(header_and_data(content)[0]["__metadata__"][DOCUMENT])


def _with_document(document: Any, content: bytes) -> bytes:
    header, data = header_and_data(content)
    header["__metadata__"][DOCUMENT] = json.dumps(document)
    return _repacked(header, data)


class StoredContext(Kind):
    """A context's file; half of the inputs are sealed again, so that more than the checksum is tried."""

    name = "context"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        resealing = [lambda random, content, seeds, one=one: sealed(one(random, content, seeds)) for one in RAW]
        documents = of_trees(Codec(_document_of, _with_document))
        self.mutators = (*RAW, *resealing, *[of_trees(RESEALED)] * 6, *[documents] * 6)

    def seeds(self) -> Sequence[bytes]:
        found = []
        for seed, length in ((1, 20), (2, 3), (3, 200)):
            path = self.folder / f"seed-{seed}"
            write_context(path, _context(seed, length), replace=True)
            found.append(path.read_bytes())
        for form in ("int8", "fp8", "int4"):
            path = self.folder / f"seed-{form}"
            write_context(path, random_context(PACKINGS[form], 3, seed=0), replace=True)
            found.append(path.read_bytes())
        return found

    def specimens(self) -> Sequence[bytes]:
        odd = self.folder / "odd"
        write_context(odd, random_context(PACKING, 20, seed=0), replace=True)  # any bits: NaN and infinities too
        return [
            b"",
            b"\0" * 8,
            odd.read_bytes(),
            packed({"__metadata__": {DOCUMENT: "[" * 100_000, CHECKSUM: UNSEALED}}, b""),
        ]

    def read(self, content: bytes) -> Context:
        path = self.file(content, "context")
        header, _ = inspect_context(path)
        packing = PACKINGS[header.kv_cache]
        context = read_context(path, packing)
        for _ in packing.unpack(context):
            pass
        return context


class HandoffBytes(Kind):
    """The announcement of a context that another process holds, with the bytes: a header and data."""

    name = "handoff"
    mutators = (*RAW, *[of_trees(SAFETENSORS)] * 12)

    def seeds(self) -> Sequence[bytes]:
        context, content = _context(1), np.zeros(largest_handoff(PACKING), np.uint8)
        handoff = write_handoff(context, PACKING, content)
        proof = recorded("lists")
        caches = tuple(replace(one, read=(), read_lists=()) for one in proof.caches)
        prompt = prompt_document_of(PromptRecord("lists", "f32", caches))
        made = {"version": 1, "tag": "0" * 32, "address": 4096, "agent": "AAAA"}
        offers = [Offer(**made, handoff=handoff), Offer(**made, handoff=handoff, kv_proof=prompt)]
        seeds = [packed(offer.model_dump(), content[: handoff.nbytes].tobytes()) for offer in offers]
        context = replace(random_context(PACKINGS["k8v4"], 20, seed=0), token_digest=context.token_digest)
        handoff = write_handoff(context, PACKINGS["k8v4"], content)
        offer = Offer(**made, handoff=handoff)
        return [*seeds, packed(offer.model_dump(), content[: handoff.nbytes].tobytes())]

    def specimens(self) -> Sequence[bytes]:
        return [packed(header, b"") for header in ({}, None, [], {"version": 1, "handoff": {"context": [[]] * 1000}})]

    def read(self, content: bytes) -> Context:
        try:
            header, data = header_and_data(content)
        except (ValueError, RecursionError):
            header, data = None, b""
        offer = offer_of({"prefill_result": {"disaggregated_params": {OFFER: header}}})
        packing = PACKINGS[offer.handoff.context.kv_cache]
        check_handoff(offer.handoff, packing, TOKENS)
        if offer.kv_proof is not None:
            prompt_record_of(offer.kv_proof, "the handoff")
        into = np.zeros(largest_handoff(packing), np.uint8)
        fetched = np.frombuffer(data[: len(into)], np.uint8)
        into[: len(fetched)] = fetched
        context = read_handoff(offer.handoff, packing, into)
        for _ in packing.unpack(context):
            pass
        return context


class KvProof(Kind):
    name = "proof"
    mutators = (*RAW, *[of_trees(JSON)] * 16)

    def seeds(self) -> Sequence[bytes]:
        found = []
        for kind in ("digest", "lists"):
            write_proof(self.folder / kind, recorded(kind), replace=True)
            found.append((self.folder / kind).read_bytes())
        return found

    def specimens(self) -> Sequence[bytes]:
        import base64

        document = json.loads(json.dumps(document_of(recorded("lists"))))
        skewed = np.full((1024, 20_000), -1)
        skewed[0] = np.arange(20_000)
        skewed[1:, 0] = 0
        lists = base64.b64encode(encode(skewed)).decode()
        one = {**document["caches"][0], "kept_lists": lists}
        many = {**document, "caches": [{**one, "cache": number} for number in range(200)]}
        return [
            json.dumps(many).encode(),
            b"[" * 100_000,
            json.dumps({**document, "prompt_token_ids": list(range(200_000))}).encode(),
            json.dumps({**document, "made_by": {**document["made_by"], "model_name": "\x1b[2J"}}).encode(),
        ]

    def read(self, content: bytes) -> Any:
        proof = read_proof(self.file(content, "proof.json"))
        list(proof.problems())
        document_of(proof)
        return proof


KINDS = (StoredContext, HandoffBytes, KvProof)
