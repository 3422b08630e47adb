from __future__ import annotations

import base64
import json

import pytest

from kvc_trt.errors import InputError
from kvc_trt.proof import document_of, read_proof, write_proof
from kvc_trt.proof.file import PromptDocument, prompt_document_of, prompt_record_of, proof_of
from tests.proof.test_record import recorded


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_proofs_read_back(kind, tmp_path):
    proof = recorded(kind)
    write_proof(tmp_path / "proof.json", proof)
    assert read_proof(tmp_path / "proof.json") == proof
    assert proof_of(json.loads(json.dumps(document_of(proof))), "it") == proof
    with pytest.raises(InputError, match=r"proof\.json"):
        write_proof(tmp_path / "proof.json", proof)
    write_proof(tmp_path / "proof.json", recorded("digest"), replace=True)


def changed(kind, *path_and_value):
    document = json.loads(json.dumps(document_of(recorded(kind))))
    *path, last, value = path_and_value
    part = document
    for key in path:
        part = part[key]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return document


LIST = base64.b64encode(b"\x02\x01").decode()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("digest", ("version", 2), "proof format 2, expected 1"),
        ("digest", ("format", "x"), "format"),
        ("digest", ("root", None), "missing key 'root'"),
        ("digest", ("roots", "x"), "unknown key 'roots'"),
        ("digest", ("root", "A" * 64), "root"),
        ("digest", ("root", "a" * 63), "root"),
        ("digest", ("kind", "all"), "kind"),
        ("digest", ("prompt_token_ids", []), "prompt_token_ids"),
        ("digest", ("answer_token_ids", []), "answer_token_ids"),
        ("digest", ("prompt_token_ids", [1.5]), "prompt_token_ids"),
        ("digest", ("prompt_token_ids", [-1]), "prompt_token_ids"),
        ("digest", ("prompt_token_ids", [1 << 40]), "prompt_token_ids"),
        ("digest", ("prompt_token_ids", "1, 2"), "prompt_token_ids"),
        ("digest", ("made_by", "policy_name", "a\x1b[2J"), "made_by"),
        ("digest", ("made_by", "prefill_precision", "f16"), "made_by"),
        ("digest", ("caches", []), "caches"),
        ("digest", ("caches", {}), "caches"),
        ("digest", ("caches", 0, "cache", 1 << 40), "caches"),
        ("digest", ("caches", 0, "cache", 2), "caches are not in ascending order"),
        (
            "digest",
            ("caches", 0, "read", ["a" * 64] * 3),
            "cache 0 has digests of 3 steps, and the tokens are those of 4",
        ),
        (
            "digest",
            ("answer_token_ids", [8, 9, 8, 9, 9]),
            "cache 0 has digests of 4 steps, and the tokens are those of 5",
        ),
        ("digest", ("caches", 0, "kept_lists", LIST), "lists in a proof of kind digest"),
        ("lists", ("caches", 0, "kept_lists", None), "expected lists for each of its 5 digests"),
        ("lists", ("caches", 0, "read_lists", [LIST] * 3), "expected lists for each of its 5 digests"),
        ("lists", ("caches", 0, "read_lists", 2, "*"), "cache 0: its lists are not valid base64"),
        ("lists", ("caches", 0, "read_lists", 2, "AB=="), "cache 0: its lists are not valid base64"),
        ("lists", ("caches", 0, "read_lists", 2, LIST), "cache 0, step 3: a list of 1 tokens ends after 0"),
        ("lists", ("caches", 1, "kept_lists", ""), "cache 2, step 0: lists of tokens of 0 heads"),
    ],
)
def test_hostile_documents_are_refused_in_one_line(kind, change, message, tmp_path):
    (tmp_path / "proof.json").write_text(json.dumps(changed(kind, *change)))
    with pytest.raises(InputError, match=message) as caught:
        read_proof(tmp_path / "proof.json")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_a_cache_without_digests_is_refused():
    document = changed("digest", "caches", 0, "read", [])
    document["caches"][0]["kept"] = None
    with pytest.raises(InputError, match="cache 0: no digest"):
        proof_of(document, "it")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{" * 200_000, "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[1]", "expected a mapping of names to values"),
        (b"null", "expected a mapping"),
        (json.dumps(document_of(recorded())).encode()[:-40], "is not valid JSON"),
    ],
)
def test_files_that_are_no_proof_are_refused_in_one_line(content, message, tmp_path):
    (tmp_path / "proof.json").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_proof(tmp_path / "proof.json")
    assert "\n" not in caught.value.message


def test_a_missing_proof_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_proof(tmp_path / "none.json")
    with pytest.raises(InputError, match="a directory; expected a regular file"):
        read_proof(tmp_path)


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_the_record_of_a_prompt_survives_json(kind):
    record = recorded(kind).of_prompt
    sent = json.loads(prompt_document_of(record).model_dump_json(exclude_none=True))
    assert prompt_record_of(PromptDocument.model_validate(sent), "it") == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"read": ["a" * 64]}, "cache 0 has digests of steps"),
        ({"kept": None}, "cache 0: no digest"),
        ({"kept_lists": LIST}, "lists in a proof of kind digest"),
    ],
)
def test_invalid_prompt_records_are_refused(change, message):
    sent = prompt_document_of(recorded().of_prompt).model_dump()
    sent["caches"][0].update(change)
    with pytest.raises(InputError, match=message):
        prompt_record_of(PromptDocument.model_validate(sent), "it")


def test_a_record_of_a_prompt_names_each_cache_once():
    sent = prompt_document_of(recorded().of_prompt).model_dump()
    sent["caches"].reverse()
    with pytest.raises(InputError, match="not in ascending order"):
        prompt_record_of(PromptDocument.model_validate(sent), "it")
