"""Files that lie: each is refused in one line that names the mistake, and memory follows the file's size."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.gguf.header import read_header
from kvc_trt.models.sources.tensor_file import TensorFile
from tests.models.gguf.tiny import write

HUGE = 1 << 63
MEBIBYTE = 1 << 20


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(pairs: list[bytes], entries: list[bytes], data: int = 256, version: int = 3) -> bytes:
    made = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(pairs)) + b"".join([*pairs, *entries])
    return made + b"\0" * (-len(made) % 32 + data)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


CASES = {
    "empty": (b"", "begins with b'', expected b'GGUF': not a GGUF file"),
    "short": (b"GG", "begins with b'GG', expected b'GGUF': not a GGUF file"),
    "another format": (b"PK\3\4" + b"\0" * 60, r"begins with b'PK.*not a GGUF file"),
    "version 1": (header([], [], version=1), "GGUF of version 1, expected little-endian and version 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "in big-endian byte order"),
    "keys beyond the file": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"{HUGE} metadata keys in a header"),
    "tensors beyond the file": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"{HUGE} tensors in a header"),
    "long key": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE) + b"\0" * 64,
        rf"a metadata key takes {HUGE} bytes, expected at most 1024",
    ),
    "long text": (header([pair(b"k", 8, struct.pack("<Q", HUGE))], []), f"metadata key 'k' takes {HUGE} bytes"),
    "text past the end": (header([pair(b"k", 8, struct.pack("<Q", 5000))], []), "'k' takes 5000 bytes at byte"),
    "long array": (header([pair(b"k", 9, array(4, HUGE))], []), f"{HUGE} numbers of metadata key 'k'"),
    "long array of texts": (header([pair(b"k", 9, array(8, HUGE))], []), f"{HUGE} texts of metadata key 'k'"),
    "array of arrays": (header([pair(b"k", 9, array(9, 1))], []), "an array of type 9"),
    "unknown kind": (header([pair(b"k", 77, b"\0" * 8)], []), "a value of type 77, which GGUF does not have"),
    "key twice": (header([pair(b"k", 0, b"\1"), pair(b"k", 0, b"\1")], []), "'k' is given twice"),
    "not text": (header([pair(b"k", 8, text(b"\xff\xfe"))], []), "expected UTF-8"),
    "alignment": (header([pair(b"general.alignment", 4, struct.pack("<I", 33))], []), "is 33, expected a power of two"),
    "alignment of zero": (header([pair(b"general.alignment", 4, b"\0" * 4)], []), "is 0, expected a power of two"),
    "name twice": (header([], [entry(b"t", (8,), 0, 0), entry(b"t", (8,), 0, 32)]), "tensor 't' is given twice"),
    "overlap": (header([], [entry(b"a", (16,), 0, 0), entry(b"b", (8,), 0, 32)]), "tensors 'a' and 'b' overlap"),
    "the same bytes": (header([], [entry(b"a", (8,), 0, 0), entry(b"b", (8,), 0, 0)]), "'a' and 'b' overlap"),
    "past the end": (header([], [entry(b"t", (64,), 0, 32)]), r"'t' takes bytes 96 to 352, but the file has 320"),
    "far past the end": (header([], [entry(b"t", (8,), 0, HUGE)]), "'t' takes bytes 9223372036854775872 to"),
    "huge shape": (header([], [entry(b"t", (HUGE, HUGE), 0, 0)]), "'t' takes bytes 96 to"),
    "unaligned": (header([], [entry(b"t", (8,), 0, 8)]), "offset 8, expected a multiple of 32"),
    "no elements": (header([], [entry(b"t", (0,), 0, 0)]), r"shape \[0\]"),
    "part of a block": (header([], [entry(b"t", (33,), 2, 0)]), r"shape \[33\], expected rows of a multiple of 32"),
    "no dimensions": (header([], [entry(b"t", (), 0, 0)]), "0 dimensions, expected 1 to 4"),
    "many dimensions": (
        header([], [text(b"t") + struct.pack("<I", 1 << 31)]),
        "2147483648 dimensions, expected 1 to 4",
    ),
    "a type that is not read": (header([], [entry(b"t", (256,), 10, 0)]), "of type Q2_K, expected one of F32"),
    "a type that nobody knows": (header([], [entry(b"t", (256,), 999, 0)]), "of type 999, which is unknown"),
}


MANY = 100_000
CASES |= {
    "many keys": (header([pair(b"k", 0, b"\0")] * MANY, []), f"{MANY} metadata keys, expected at most 4096"),
    "many tensors": (header([], [entry(b"t", (8,), 0, 0)] * MANY), f"{MANY} tensors, expected at most 65536"),
    "many texts": (
        header([pair(b"k", 9, array(8, 25 * MANY, text(b"") * 25 * MANY))], []),
        f"{25 * MANY} texts of metadata key 'k', expected at most 2097152",
    ),
}


def opened(path):
    """Return the error of reading a file, and the most memory that it took."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            GgufCheckpoint(path)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", CASES)
def test_a_false_size_is_refused_before_memory_is_allocated_for_it(case, tmp_path):
    content, message = CASES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    error, peak = opened(path)
    with pytest.raises(InputError, match=message):
        raise error
    assert "\n" not in error.message
    assert len(error.message) < 400
    assert error.message.startswith(f"{path}: ")
    assert peak < 4 * MEBIBYTE


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return write(tmp_path_factory.mktemp("valid") / "model.gguf", kind="Q8_0").read_bytes()


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.005, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(share, valid, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(valid[: int(len(valid) * share)])
    error, peak = opened(path)
    assert str(path) in error.message
    assert peak < 4 * MEBIBYTE


def test_a_header_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr("kvc_trt.models.gguf.header.MAX_HEADER_BYTES", 2048)
    path = tmp_path / "large.gguf"
    path.write_bytes(header([pair(b"k", 8, text(b"x" * 4000))], []))
    with pytest.raises(InputError, match="are left of the 2048 of a header"):
        GgufCheckpoint(path)


def test_texts_are_counted_over_all_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr("kvc_trt.models.gguf.header._MOST_TEXTS", 5)
    path = tmp_path / "many.gguf"
    path.write_bytes(header([pair(key, 9, array(8, 3, text(b"") * 3)) for key in (b"a", b"b")], []))
    with pytest.raises(InputError, match="3 texts of metadata key 'b', expected at most 2"):
        GgufCheckpoint(path)


@given(data=st.data())
def test_a_changed_header_is_refused_in_one_line_or_read(data, valid, tmp_path_factory):
    """Whatever eight bytes become, nothing but InputError comes out, and memory stays near the header's size."""
    content = bytearray(valid)
    start = data.draw(st.integers(0, 12000))
    value = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 7 + b"\x80"])))
    content[start : start + len(value)] = value
    path = tmp_path_factory.mktemp("changed") / "model.gguf"
    path.write_bytes(content)
    message = ""
    tracemalloc.start()
    try:
        GgufCheckpoint(path).tokenizer_contents()
    except InputError as error:
        message = error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < 16 * MEBIBYTE


@given(content=st.binary(max_size=400))
def test_random_bytes_after_the_magic_are_refused(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "model.gguf"
    path.write_bytes(b"GGUF" + content)
    with pytest.raises(InputError):
        GgufCheckpoint(path)


def test_padding_between_tensors_and_another_alignment_are_read(tmp_path):
    path = tmp_path / "model.gguf"
    pairs = [pair(b"general.alignment", 4, struct.pack("<I", 64))]
    made = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + b"".join(pairs)
    made += entry(b"b", (8,), 0, 128) + entry(b"a", (4, 2), 1, 0)
    path.write_bytes(made + b"\0" * (-len(made) % 64) + bytes(range(160)))
    read = read_header(TensorFile(path))
    start = len(made) + (-len(made) % 64)
    assert read.tensors["a"].offset == start
    assert read.tensors["a"].shape == (2, 4)
    assert read.tensors["b"].offset == start + 128


def test_damaged_headers_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        GgufCheckpoint(tmp_path / "nowhere.gguf")
    with pytest.raises(InputError, match="a directory; expected a regular file"):
        GgufCheckpoint(tmp_path)
