from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from kvc_trt.errors import InputError
from kvc_trt.models.sources.safetensors_file import ALIGNMENT, DTYPES, SafetensorsFile, TensorPlan, write_safetensors


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[object], dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


VALID = raw(
    {"__metadata__": {"format": "pt"}, "a": entry(0, 24, [2, 3]), "b": entry(24, 32, [4], "BF16")},
    np.arange(6, dtype=np.float32).tobytes() + np.arange(4).astype(ml_dtypes.bfloat16).tobytes(),
)
SAME = json.dumps(entry(0, 4, [1])).encode()


@pytest.fixture
def written(tmp_path):
    def write(content: bytes):
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return path

    return write


def test_names_metadata_and_tensors_are_read(written):
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
    values = np.arange(6).astype(DTYPES[dtype])
    path = written(raw({"x": entry(0, values.nbytes, [6], dtype)}, values.tobytes()))
    np.testing.assert_array_equal(SafetensorsFile(path).read("x"), load_file(path)["x"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header too small"),
        (b"\0\0\0", "header too small"),
        (raw(b"", b""), "EOF while parsing"),
        (raw(b"{}", length=1 << 40), "header too large"),
        (raw(b"{}", length=(1 << 64) - 1), "header too large"),
        (raw(b"{}", length=3), "invalid header length"),
        (VALID[:40], "invalid header length"),
        (VALID[:-1], "not fully covered"),
        (VALID + b"\0", "not fully covered"),
        (raw(b"[1]"), "invalid type: sequence"),
        (raw(b" {}"), "header begins with"),
        (raw(b"{'a': 1}"), "invalid JSON"),
        (raw(b"{\xff}"), "invalid UTF-8"),
        (raw(b'{"a":NaN}'), "invalid JSON"),
        (raw(b"[" * 100_000), "invalid JSON"),
        (raw(b'{"a":' * 50_000), "recursion limit"),
        (raw(b'{"a":' + b"9" * 5000 + b"}"), "out of range"),
        (raw(b'{"a":{},"a":{}}'), "missing field"),
        (raw(b'{"a":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), "duplicate field `dtype`"),
        (raw(b'{"a":%b,"a":%b}' % (SAME, SAME), bytes(4)), "duplicate key 'a'"),
        (raw(b'{"__metadata__":{"x":"1","x":"2"}}'), "duplicate key 'x'"),
        (raw({"__metadata__": {"x": 1}}), "expected a string"),
        (raw({"__metadata__": []}), "expected a map"),
        (raw({"a": 3}), "expected struct TensorInfo"),
        (raw({"a": {"dtype": "F32", "shape": [0]}}), "missing field `data_offsets`"),
        (raw({"a": entry(0, 4, [1]) | {"extra": 1}}, b"1234"), "expected dtype, shape"),
        (raw({"a": entry(0, 4, [1], "F33")}, b"1234"), "unknown variant `F33`"),
        (raw({"a": entry(0, 8, [1], "C64")}, bytes(8)), "dtype 'C64', expected one of BOOL"),
        (raw({"a": entry(0, 4, [1], 7)}, b"1234"), "invalid type: integer `7`"),
        (raw({"a": entry(0, 4, [1], ["F32"])}, b"1234"), "invalid type: sequence"),
        (raw({"a": entry(0, 4, [1], "F16")}, b"1234"), "invalid shape, data type"),
        (raw({"a": entry(0, 4, [-1, -1])}, b"1234"), "invalid value: integer `-1`"),
        (raw({"a": entry(0, 4, [1.0])}, b"1234"), "floating point"),
        (raw({"a": entry(0, 4, [True])}, b"1234"), "boolean"),
        (raw({"a": entry(0, 4, [1] * 33)}, b"1234"), "more than an array can have"),
        (raw({"a": entry(0, 0, [1 << 63, 0])}), "more than an array can have"),
        (raw({"a": entry(0, 0, [0, 1 << 61])}), "more than an array can have"),
        (raw({"a": entry(0, 0, [1 << 31, 0, 1 << 31])}), "more than an array can have"),
        (raw({"a": entry(0, 4, [1 << 32, 1 << 32, 1])}, b"1234"), "overflow"),
        (raw({"a": entry(0, 0, [1 << 62, 4])}), "overflow"),
        (raw({"a": entry(4, 0, [1])}, b"1234"), "invalid offset"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, b"1234"), "invalid length 3"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"), "invalid value: integer `-4`"),
        (raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)), "invalid offset for tensor `b`"),
        (raw({"a": entry(4, 8, [1])}, bytes(8)), "invalid offset for tensor `a`"),
        (raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)), "invalid offset for tensor `b`"),
        (raw({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)), "invalid offset for tensor"),
        (raw({"a": entry(0, 1 << 40, [1 << 38])}, bytes(8)), "not fully covered"),
        (raw(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)), "hex escape"),
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


def test_a_header_of_absurd_size_is_not_read(written):
    path = written(raw(b"{}", length=100_000_001))
    os.truncate(path, 100_000_009)
    with pytest.raises(InputError, match=r"a header of 95\.4 MiB; expected at most 16\.0 MiB"):
        SafetensorsFile(path)


def test_irregular_files_are_refused_at_once(tmp_path):
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
    content = bytearray(VALID)
    for position, value in changes:
        content[position] = value
    path = written(bytes(content))
    try:
        file = SafetensorsFile(path)
        tensors = {name: file.read(name) for name in file.names()}
    except InputError:
        return
    with safe_open(path, framework="numpy") as theirs:
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


WRITTEN_DTYPES = ["float32", "float16", "bfloat16", "uint8", "int64"]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def array_of(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 100, shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@given(st.lists(st.tuples(st.sampled_from(WRITTEN_DTYPES), SHAPES), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_written_files_read_back_here_and_in_the_library(tmp_path, specification):
    arrays = {f"t{i}": array_of(dtype, tuple(shape), i) for i, (dtype, shape) in enumerate(specification)}
    plans = [TensorPlan(name, str(a.dtype), a.shape, lambda a=a: a) for name, a in arrays.items()]
    path = tmp_path / "w.safetensors"
    places = write_safetensors(path, plans, {"note": "ü"})
    file = SafetensorsFile(path)
    assert file.names() == list(arrays)
    assert file.metadata == {"note": "ü"}
    content = path.read_bytes()
    theirs = load_file(path)
    for name, array in arrays.items():
        offset, nbytes = places[name]
        assert offset % ALIGNMENT == 0
        assert content[offset : offset + nbytes] == array.tobytes()
        assert file.read(name).tobytes() == theirs[name].tobytes() == array.tobytes()
        assert file.read(name).dtype == array.dtype
        assert file.read(name).shape == array.shape


def test_pieces_make_the_same_file_and_progress_counts_every_byte(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(12, 5)
    whole, pieces = tmp_path / "a", tmp_path / "b"
    write_safetensors(whole, [TensorPlan("x", "float32", (12, 5), lambda: array)])
    seen: list[int] = []
    cut = TensorPlan("x", "float32", (12, 5), lambda: (array[i : i + 5] for i in (0, 5, 10)))
    write_safetensors(pieces, [cut], progress=seen.append)
    assert whole.read_bytes() == pieces.read_bytes()
    assert seen == [100, 100, 40]


def test_a_transposed_array_is_written_in_its_own_order(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(tmp_path / "x", [TensorPlan("x", "float32", (3, 2), lambda: array)])
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "x").read("x"), array)


@pytest.mark.parametrize(
    "made",
    [
        np.zeros((3, 4), np.float32),
        np.zeros((2, 5), np.float32),
        np.zeros((2, 4), np.float16),
        [np.zeros((1, 4), np.float32)],
        [np.zeros((1, 4), np.float32)] * 3,
    ],
)
def test_a_tensor_that_differs_from_its_plan_is_an_error(tmp_path, made):
    with pytest.raises(ValueError, match=r"planned|made"):
        write_safetensors(tmp_path / "x", [TensorPlan("x", "float32", (2, 4), lambda: made)])


@pytest.mark.parametrize("name", ["x", "__metadata__", "__padding__.0"])
def test_taken_and_reserved_names_are_refused(tmp_path, name):
    plans = [TensorPlan(n, "uint8", (1,), lambda: np.zeros(1, np.uint8)) for n in ("x", name)]
    with pytest.raises(ValueError, match="taken or reserved"):
        write_safetensors(tmp_path / "w", plans, {"k": "v"})


def test_writing_holds_one_piece_in_memory_at_a_time(tmp_path):
    """Pieces are asked for lazily: the next is made only after the last is on its way to disk."""
    alive = 0

    def pieces():
        nonlocal alive
        for _ in range(8):
            alive += 1
            assert alive == 1
            yield np.zeros((1, 1000), np.float32)
            alive -= 1

    write_safetensors(tmp_path / "x", [TensorPlan("x", "float32", (8, 1000), pieces)])


@given(
    st.lists(st.integers(0, 63).map(lambda power: 1 << power), max_size=4),
    st.integers(0, 4),
    st.sampled_from(["U8", "F64"]),
)
def test_an_empty_tensor_is_read_or_refused(extents, place, dtype):
    shape = [*extents[:place], 0, *extents[place:]]
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw({"a": entry(0, 0, shape, dtype)}))
        file.flush()
        try:
            opened = SafetensorsFile(file.name)
        except InputError as refused:
            ours = "more than an array can have" in refused.message
            numpys = r"too big|exceeded|cannot reshape"
            with pytest.raises(ValueError, match=numpys) if ours else contextlib.nullcontext():
                np.empty(0, DTYPES[dtype]).reshape(shape if ours else 0)
        else:
            assert opened.read("a").shape == tuple(shape)
            opened.close()


@pytest.mark.parametrize("repeated", [False, True], ids=["once", "twice"])
def test_many_names_take_time_in_proportion(written, repeated):
    names = [f"tensor.{number}" for number in range(30_000)]
    pairs = ",".join(f'"{name}":%s' % json.dumps(entry(0, 0, [0])) for name in names + names[-1:] * repeated)
    path = written(raw(b"{" + pairs.encode() + b"}"))
    began = time.process_time()
    with pytest.raises(InputError, match="duplicate key") if repeated else contextlib.nullcontext():
        assert len(SafetensorsFile(path).names()) == 30_000
    assert time.process_time() - began < 15, "the square of their number takes a minute"
