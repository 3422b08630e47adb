from __future__ import annotations

import contextlib
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models import safetensors_file
from kvc_trt.models.safetensors_file import SafetensorsFile


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[object], dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


VALID = raw(
    {"__metadata__": {"format": "pt"}, "a": entry(0, 24, [2, 3]), "b": entry(24, 32, [4], "BF16")},
    np.arange(6, dtype=np.float32).tobytes() + np.arange(4).astype(ml_dtypes.bfloat16).tobytes(),
)


@pytest.fixture
def written(tmp_path):
    def write(content: bytes):
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return path

    return write


def test_reads_what_is_there(written):
    file = SafetensorsFile(written(VALID))
    assert file.names() == ["a", "b"]
    assert file.metadata == {"format": "pt"}
    np.testing.assert_array_equal(file.read("a"), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert file.read("b").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(file.read("b").astype(np.float32), np.arange(4))
    np.testing.assert_array_equal(file.read_rows("a", 1, 2), [[3, 4, 5]])
    assert file.read_rows("a", 2, 2).shape == (0, 3)
    with pytest.raises(ValueError, match=r"rows 1\.\.3"):
        file.read_rows("a", 1, 3)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64"])
def test_every_dtype_reads_as_the_safetensors_library_does(written, dtype):
    library = pytest.importorskip("safetensors.numpy")
    name, size = safetensors_file.DTYPES[dtype]
    values = np.arange(6).astype(name)
    path = written(raw({"x": entry(0, 6 * size, [6], dtype)}, values.tobytes()))
    np.testing.assert_array_equal(SafetensorsFile(path).read("x"), library.load_file(path)["x"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too short"),
        (b"\0\0\0", "too short"),
        (raw(b"", b""), "header length 0"),
        (raw(b"{}", length=1 << 40), "header length"),
        (raw(b"{}", length=(1 << 64) - 1), "header length"),
        (raw(b"{}", length=3), "exceeds the 2 bytes"),
        (VALID[:40], "exceeds"),
        (VALID[:-1], "truncated"),
        (VALID + b"\0", "trailing"),
        (raw(b"[1]"), "not a JSON object"),
        (raw(b" {}"), "not a JSON object"),
        (raw(b"{'a': 1}"), "not valid JSON"),
        (raw(b"{\xff}"), "not valid JSON"),
        (raw(b'{"a":NaN}'), "not valid JSON"),
        (raw(b"[" * 100_000), "not valid JSON"),
        (raw(b'{"a":' * 50_000), "not valid JSON"),
        (raw(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
        (raw(b'{"a":{},"a":{}}'), "duplicate key"),
        (raw(b'{"a":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), "duplicate key"),
        (raw({"__metadata__": {"x": 1}}), "__metadata__"),
        (raw({"__metadata__": []}), "__metadata__"),
        (raw({"a": 3}), "expected dtype, shape"),
        (raw({"a": {"dtype": "F32", "shape": [0]}}), "expected dtype, shape"),
        (raw({"a": entry(0, 4, [1]) | {"extra": 1}}, b"1234"), "expected dtype, shape"),
        (raw({"a": entry(0, 4, [1], "F33")}, b"1234"), "dtype"),
        (raw({"a": entry(0, 4, [1], 7)}, b"1234"), "dtype"),
        (raw({"a": entry(0, 4, [1], ["F32"])}, b"1234"), "dtype"),
        (raw({"a": entry(0, 4, [1], "F16")}, b"1234"), "does not take"),
        (raw({"a": entry(0, 4, [-1, -1])}, b"1234"), "shape"),
        (raw({"a": entry(0, 4, [1.0])}, b"1234"), "shape"),
        (raw({"a": entry(0, 4, [True])}, b"1234"), "shape"),
        (raw({"a": entry(0, 4, [1] * 33)}, b"1234"), "shape"),
        (raw({"a": entry(0, 0, [1 << 63, 0])}), "shape"),
        (raw({"a": entry(0, 4, [1 << 32, 1 << 32, 1])}, b"1234"), "does not take"),
        (raw({"a": entry(0, 0, [1 << 62, 4])}), "does not take"),
        (raw({"a": entry(4, 0, [1])}, b"1234"), "data_offsets"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, b"1234"), "data_offsets"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"), "data_offsets"),
        (raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)), "hole"),
        (raw({"a": entry(4, 8, [1])}, bytes(8)), "hole"),
        (raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)), "overlaps"),
        (raw({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)), "overlaps"),
        (raw({"a": entry(0, 1 << 40, [1 << 38])}, bytes(8)), "truncated"),
        (raw(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)), "Unicode"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused(written, content, words):
    path = written(content)
    with pytest.raises(InputError, match=words) as caught:
        SafetensorsFile(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    caught.value.message.encode()


def test_header_cap_is_the_formats_own(written, monkeypatch):
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 10)
    with pytest.raises(InputError, match="header length"):
        SafetensorsFile(written(VALID))


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError):
            SafetensorsFile(path)


def test_a_file_that_shrinks_while_read_is_noticed(written):
    path = written(VALID)
    file = SafetensorsFile(path)
    os.truncate(path, len(VALID) - 3)
    with pytest.raises(InputError, match="ends inside tensor 'b'"):
        file.read("b")


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@example([(0, 255)])
@example([(8, 0)])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_file_is_refused_or_read_as_the_library_reads_it(written, changes):
    library = pytest.importorskip("safetensors")
    content = bytearray(VALID)
    for position, value in changes:
        content[position] = value
    path = written(bytes(content))
    try:
        file = SafetensorsFile(path)
        tensors = {name: file.read(name) for name in file.names()}
    except InputError:
        return
    with library.safe_open(path, framework="numpy") as theirs:
        assert sorted(theirs.keys()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert tuple(theirs.get_slice(name).get_shape()) == tensor.shape
    for name, tensor in tensors.items():
        entry = file.entries[name]
        assert tensor.tobytes() == bytes(content)[entry.offset : entry.offset + entry.nbytes]


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused_or_read(written, content):
    for blob in (content, raw(content)):
        with contextlib.suppress(InputError):
            SafetensorsFile(written(blob)).names()
