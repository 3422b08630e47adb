"""A context's file: written data reads back, and anything else is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kvc_trt.contexts.file import (
    CHECKSUM,
    DOCUMENT,
    LOGITS,
    UNSEALED,
    inspect_context,
    read_context,
    write_context,
)
from kvc_trt.errors import InputError
from kvc_trt.models.sources.safetensors_file import SafetensorsFile, TensorPlan, serialised
from kvc_trt.runtime.context import Context
from tests.contexts.conftest import packing_without_graphs, random_context

ANY_FILE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PACKING = packing_without_graphs("rocketkv")


@pytest.fixture
def stored(tmp_path):
    context = random_context(PACKING, 20, seed=0)
    write_context(tmp_path / "context", context)
    return tmp_path / "context"


def assert_same(found: Context, expected: Context) -> None:
    for field in fields(Context):
        if field.name not in ("logits", "tensors"):
            assert getattr(found, field.name) == getattr(expected, field.name)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in {LOGITS: expected.logits, **expected.tensors}.items():
        own = found.logits if name == LOGITS else found.tensors[name]
        assert (own.dtype, own.shape, own.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())


@given(
    policy=st.sampled_from(
        ["full", "rocketkv", "rocketkv-mt", "sparq", "h2o", "tova", "streaming-llm", "duo-attention"]
    ),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    tokens=st.integers(1, 256),
    seed=st.integers(0, 99),
)
@ANY_FILE
def test_context_files_read_back_bit_for_bit(tmp_path, policy, dtype, tokens, seed):
    packing = packing_without_graphs(policy, dtype)
    context = random_context(packing, tokens, seed)
    write_context(tmp_path / "context", context, replace=True)
    assert_same(read_context(tmp_path / "context", packing), context)
    header, tensors = inspect_context(tmp_path / "context")
    assert (header.logical_length, header.fingerprint) == (tokens, packing.fingerprint)
    assert sum(tensor.nbytes for tensor in tensors) == context.nbytes


def test_the_safetensors_library_reads_the_same(stored):
    theirs = load_file(stored)
    found = read_context(stored, PACKING)
    for name, tensor in {LOGITS: found.logits, **found.tensors}.items():
        assert theirs[name].tobytes() == tensor.tobytes()


@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
@ANY_FILE
def test_a_file_with_any_byte_changed_is_refused(stored, place, change):
    content = bytearray(stored.read_bytes())
    content[int(place * len(content))] ^= change
    changed = stored.with_name("changed")
    changed.write_bytes(content)
    for read in (lambda: read_context(changed, PACKING), lambda: inspect_context(changed)):
        with pytest.raises(InputError) as caught:
            read()
        assert "\n" not in caught.value.message
        assert caught.value.message.isprintable()


@given(place=st.floats(0, 1, exclude_max=True))
@ANY_FILE
def test_a_truncated_file_is_refused(stored, place):
    content = stored.read_bytes()
    short = stored.with_name("short")
    short.write_bytes(content[: int(place * len(content))])
    with pytest.raises(InputError, match="damaged"):
        read_context(short, PACKING)


@given(st.binary(max_size=300))
@ANY_FILE
def test_random_bytes_are_refused_as_a_context(tmp_path, content):
    (tmp_path / "any").write_bytes(content)
    with pytest.raises(InputError):
        read_context(tmp_path / "any", PACKING)


def sealed(path, document, tensors, **metadata):
    """Write a file whose checksum is right, whatever it says."""
    import hashlib

    plans = [TensorPlan(name, str(array.dtype), array.shape, lambda array=array: array) for name, array in tensors]
    text = document if isinstance(document, str) else json.dumps(document)
    known = {DOCUMENT: text, CHECKSUM: UNSEALED, **metadata}
    whole = b"".join(bytes(piece) for piece in serialised(plans, known)[0])
    known[CHECKSUM] = hashlib.sha256(whole).hexdigest()
    path.write_bytes(b"".join(bytes(piece) for piece in serialised(plans, known)[0]))
    return path


def parts(stored):
    """Return the document and the tensors of a stored file."""
    file = SafetensorsFile(stored)
    return json.loads(file.metadata[DOCUMENT]), [(name, file.read(name)) for name in file.names()]


def test_a_context_file_resealed_from_its_parts_is_identical(stored):
    document, tensors = parts(stored)
    again = sealed(stored.with_name("again"), json.dumps(document, separators=(",", ":")), tensors)
    assert again.read_bytes() == stored.read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "context format 2, expected 1"),
        ({"version": "1\x1b[31m"}, r"context format '1\\x1b\[31m', expected 1"),
        ({"logical_length": 273}, "273 tokens, expected at most 272"),
        ({"logical_length": 0}, "logical_length"),
        ({"logical_length": 1 << 40}, "logical_length"),
        ({"logical_length": 20.0}, "logical_length"),
        ({"logical_length": True}, "logical_length"),
        ({"cache_lengths": [20, 20]}, "lengths of 2 caches, expected 3"),
        ({"cache_lengths": [20, 20, 21]}, "cache 2 has 21 tokens, expected at most 20"),
        ({"cache_lengths": [20, 20, 19]}, r"tensor k\.2 is float32 \[2, 20, 16\], expected float32 \[2, 19, 16\]"),
        ({"cache_lengths": [20, 20, -1]}, "cache_lengths"),
        ({"cache_lengths": "20"}, "cache_lengths"),
        ({"model_name": "small\x1b]0;title\x07"}, "model_name"),
        ({"policy_name": "x" * 300}, "policy_name"),
        ({"weights": "A" * 64}, "weights"),
        ({"compatibility": "0" * 64}, "does not follow from its other digests"),
        ({"more": 1}, "more"),
    ],
)
def test_a_document_with_wrong_values_is_refused(stored, change, words):
    document, tensors = parts(stored)
    with pytest.raises(InputError, match=words) as caught:
        read_context(sealed(stored, {**document, **change}, tensors), PACKING)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", "not valid JSON"),
        ("[1]", "expected a mapping"),
        ("[" * 9000, "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
    ],
)
def test_a_malformed_document_is_refused(stored, document, words):
    _, tensors = parts(stored)
    with pytest.raises(InputError, match=words):
        read_context(sealed(stored, document, tensors), PACKING)


def test_a_missing_key_is_named(stored):
    document, tensors = parts(stored)
    del document["tokens"]
    with pytest.raises(InputError, match="tokens"):
        read_context(sealed(stored, document, tensors), PACKING)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[1:], "tensor 'logits' is missing"),
        (lambda tensors: tensors[:-1], "is missing"),
        (lambda tensors: [*tensors, ("k.9", tensors[1][1])], r"tensor 'k\.9' does not belong"),
        (lambda tensors: [*tensors, ("bounds.0", tensors[1][1])], r"tensor 'bounds\.0' does not belong"),
        (lambda tensors: [(name, array.view(np.uint32)) for name, array in tensors], "expected float32"),
        (lambda tensors: [(name, array[:1]) for name, array in tensors], r"expected float32 \[97\]"),
        (lambda tensors: [tensors[0], *((name, array[..., :8]) for name, array in tensors[1:])], "20, 8"),
    ],
)
def test_tensors_that_are_not_the_engines_are_refused_before_any_is_read(stored, change, words, monkeypatch):
    document, tensors = parts(stored)
    path = sealed(stored, document, change(tensors))

    def never(*_):
        raise AssertionError("state was read")

    monkeypatch.setattr(SafetensorsFile, "read", never)
    with pytest.raises(InputError, match=words):
        read_context(path, PACKING)


@pytest.mark.parametrize("name", ["k.9", "k", "k.00", "K.0", "k.-1", "\x1b.0", "k.0.1"])
def test_inspection_refuses_a_tensor_of_no_cache(stored, name):
    document, tensors = parts(stored)
    with pytest.raises(InputError, match="belongs to none of its 3 caches") as caught:
        inspect_context(sealed(stored, document, [*tensors, (name, tensors[1][1])]))
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("model", r"is of model other \(fp32 weights\); this engine has small"),
        ("parameters", "was made under policy other; this engine has some policy"),
        ("weights", "by an engine with other weights: expected digest 111111111111, found ffffffffffff"),
        ("state", "by an engine with other state tensors"),
    ],
)
def test_another_engines_context_is_refused_with_the_reason(tmp_path, field, words):
    names = {"model": {"model_name": "other (fp32 weights)"}, "parameters": {"policy_name": "other"}}.get(field, {})
    made_by = replace(PACKING.fingerprint, **{field: "f" * 64}, **names)
    write_context(tmp_path / "context", replace(random_context(PACKING, 9, 0), fingerprint=made_by))
    with pytest.raises(InputError, match=words):
        read_context(tmp_path / "context", PACKING)


def test_a_context_of_another_backends_engine_fits(tmp_path):
    made_by = replace(PACKING.fingerprint, engine="f" * 64)
    assert made_by.compatibility == PACKING.fingerprint.compatibility
    write_context(tmp_path / "context", replace(random_context(PACKING, 9, 0), fingerprint=made_by))
    assert read_context(tmp_path / "context", PACKING).fingerprint == made_by


def test_other_safetensors_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3)}, tmp_path / "weights")
    with pytest.raises(InputError, match="a safetensors file, but not a context"):
        read_context(tmp_path / "weights", PACKING)


def test_padding_that_is_not_blank_is_refused(stored):
    """Our writer never makes a whole line of it, and nobody reads it."""
    content = stored.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["__padding__.x"] = {"dtype": "U8", "shape": [1000], "data_offsets": [end, end + 1000]}
    text = json.dumps(header, separators=(",", ":")).encode()
    stored.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :] + bytes(1000))
    with pytest.raises(InputError, match="1000 bytes of padding"):
        read_context(stored, PACKING)


def test_an_old_file_is_replaced_only_when_asked_for_and_only_whole(stored, monkeypatch):
    before, other = stored.read_bytes(), random_context(PACKING, 30, seed=1)
    with pytest.raises(InputError, match="exists and is not replaced"):
        write_context(stored, other)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_context(stored, other, replace=True)
    assert stored.read_bytes() == before
    assert os.listdir(stored.parent) == [stored.name]
    monkeypatch.undo()
    write_context(stored, other, replace=True)
    assert_same(read_context(stored, PACKING), other)


def test_inspection_takes_no_memory_for_a_claimed_size(stored, tmp_path):
    """A file with a hole in it costs its maker nothing."""
    document, tensors = parts(stored)
    claimed = tmp_path / "claimed"
    large = np.zeros((1, 16 << 20, 1), np.float32)
    sealed(claimed, document, [(name, large if name == "k.0" else tensor) for name, tensor in tensors])
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"k\.0"):
            read_context(claimed, PACKING)
        inspect_context(claimed)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_inspection_needs_no_executor(stored):
    code = (
        "import sys; from pathlib import Path; from kvc_trt.contexts.file import inspect_context\n"
        f"inspect_context(Path({str(stored)!r}))\n"
        "print([name for name in ('torch', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
