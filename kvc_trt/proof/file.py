"""A proof as a JSON document, written whole or not at all, and read as hostile input."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from kvc_trt.errors import InputError, describe
from kvc_trt.files.atomic import write_new_file
from kvc_trt.files.inputs import read_json_input
from kvc_trt.proof.lists import check_lists
from kvc_trt.proof.record import CacheRecord, MadeBy, PrefillPrecision, PromptRecord, Proof, ProofKind, lists_of
from kvc_trt.validation import OwnSchema, validated
from kvc_trt.version import __version__

VERSION: Final = 1
LARGEST_FILE = 1 << 30
"""The largest file in bytes; a proof with lists of a long answer has some hundred million."""
_MOST_CACHES, _MOST_TOKENS = 4096, 1 << 24

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,200}$")]
"""A name of printable ASCII, because it is printed to terminals, which other characters could control."""
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=_MOST_TOKENS)]


class _MadeBy(OwnSchema):
    engine: Digest
    weights: Digest
    model: Digest
    policy: Digest
    model_name: Name
    policy_name: Name
    prefill_precision: PrefillPrecision


class _Cache(OwnSchema):
    cache: Annotated[int, Field(ge=0, lt=_MOST_CACHES)]
    kept: Digest | None
    read: Annotated[list[Digest], Field(max_length=_MOST_TOKENS)]
    kept_lists: str | None = None
    read_lists: Annotated[list[str], Field(max_length=_MOST_TOKENS)] | None = None


class PromptDocument(OwnSchema):
    """A `PromptRecord` in the form that is sent between processes."""

    kind: ProofKind
    prefill_precision: PrefillPrecision
    caches: Annotated[list[_Cache], Field(max_length=_MOST_CACHES)]


class _Document(OwnSchema):
    format: Literal["kvc-trt kv proof"]
    version: Literal[1]
    written_by: Name
    kind: ProofKind
    made_by: _MadeBy
    prompt_token_ids: Annotated[Tokens, Field(min_length=1)]
    continuation_token_ids: Tokens
    answer_token_ids: Annotated[Tokens, Field(min_length=1)]
    prompt_digest: Digest
    answer_digest: Digest
    caches: Annotated[list[_Cache], Field(min_length=1, max_length=_MOST_CACHES)]
    root: Digest


def document_of(proof: Proof) -> dict[str, Any]:
    """Return a proof as plain values for JSON: digests in hex, lists in base64."""
    return {
        "format": "kvc-trt kv proof",
        "version": VERSION,
        "written_by": f"kvc-trt {__version__}",
        "kind": proof.kind,
        "made_by": asdict(proof.made_by),
        "prompt_token_ids": list(proof.prompt_token_ids),
        "continuation_token_ids": list(proof.continuation_token_ids),
        "answer_token_ids": list(proof.answer_token_ids),
        "prompt_digest": proof.prompt_digest,
        "answer_digest": proof.answer_digest,
        "caches": [_plain(record, proof.kind) for record in proof.caches],
        "root": proof.root,
    }


def prompt_document_of(record: PromptRecord) -> PromptDocument:
    """Return the record of a prompt in the form that is sent between processes."""
    caches = [_Cache(**_plain(one, record.kind)) for one in record.caches]
    return PromptDocument(kind=record.kind, prefill_precision=record.prefill_precision, caches=caches)


def prompt_record_of(document: PromptDocument, source: str) -> PromptRecord:
    """Return the record of a prompt that another process has sent; InputError, naming `source`, if it is invalid."""
    caches = _records(document.caches, document.kind, source)
    for record in caches:
        if record.read:
            raise InputError(f"{source}: cache {record.cache} has digests of steps, expected those of a prompt alone")
    return PromptRecord(document.kind, document.prefill_precision, caches)


def write_proof(path: Path, proof: Proof, *, replace: bool = False) -> None:
    """Write a proof to a new file; with `replace` over an old one. Errors are those of `write_new_pieces`."""
    write_new_file(path, json.dumps(document_of(proof)) + "\n", replace=replace)


def read_proof(path: Path) -> Proof:
    """Read a proof; InputError if the file is not a proof.

    `Proof.problems` checks that its digests are consistent, and a replay that they are true.
    """
    return proof_of(read_json_input(path, LARGEST_FILE), str(path))


def proof_of(found: object, source: str) -> Proof:
    """Return the proof in a document; InputError, naming `source`, if it is not a proof."""
    if isinstance(found, dict) and found.get("version") != VERSION:
        raise InputError(
            f"{source}: proof format {describe(found.get('version'))}, expected {VERSION}",
            hint="give only the proof of a server's answer: choices[0].kvc.kv_proof, or kv_proof of Triton",
        )
    document = validated(_Document, found, source)
    caches = _records(document.caches, document.kind, source)
    proof = Proof(
        MadeBy(**document.made_by.model_dump()),
        document.kind,
        tuple(document.prompt_token_ids),
        tuple(document.continuation_token_ids),
        tuple(document.answer_token_ids),
        document.prompt_digest,
        document.answer_digest,
        caches,
        document.root,
    )
    for record in proof.caches:
        if len(record.read) not in (0, len(proof.fed)):
            found = f"digests of {len(record.read)} steps, and the tokens are those of {len(proof.fed)}"
            raise InputError(f"{source}: cache {record.cache} has {found}")
    return proof


def _plain(record: CacheRecord, kind: ProofKind) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cache": record.cache,
        "kept": None if record.kept is None else record.kept.hex(),
        "read": [digest.hex() for digest in record.read],
    }
    if kind == "lists":
        found["kept_lists"] = None if record.kept_lists is None else _base64(record.kept_lists)
        found["read_lists"] = [_base64(lists) for lists in record.read_lists or ()]
    return found


def _records(caches: Sequence[_Cache], kind: ProofKind, source: str) -> tuple[CacheRecord, ...]:
    records = tuple(_record(one, kind, source) for one in caches)
    numbers = [one.cache for one in records]
    if numbers != sorted(set(numbers)):
        raise InputError(f"{source}: caches are not in ascending order")
    for record in records:
        for step, _, lists in lists_of(record):
            try:
                check_lists(lists)
            except InputError as error:
                raise InputError(f"{source}: cache {record.cache}, step {step}: {error.message}") from error
    return records


def _record(one: _Cache, kind: ProofKind, source: str) -> CacheRecord:
    what = f"{source}: cache {one.cache}"
    kept = None if one.kept is None else bytes.fromhex(one.kept)
    read = tuple(map(bytes.fromhex, one.read))
    if kept is None and not read:
        raise InputError(f"{what}: no digest")
    if kind == "digest":
        if one.kept_lists is not None or one.read_lists is not None:
            raise InputError(f"{what}: lists in a proof of kind digest")
        return CacheRecord(one.cache, kept, read)
    if (one.kept_lists is None) != (kept is None) or len(one.read_lists or ()) != len(read):
        raise InputError(f"{what}: expected lists for each of its {len(read) + (kept is not None)} digests")
    kept_lists = None if one.kept_lists is None else _bytes(one.kept_lists, what)
    return CacheRecord(one.cache, kept, read, kept_lists, tuple(_bytes(text, what) for text in one.read_lists or ()))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{what}: its lists are not valid base64") from error
    if _base64(data) != text:
        raise InputError(f"{what}: its lists are not valid base64")
    return data
