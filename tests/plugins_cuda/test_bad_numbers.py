"""Every number of every parameter struct with a bad value: refused by name, and nothing is written.

The calls are generated from what each field may hold; a field without an entry fails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.bad_calls import INT32, INT64, NUMBERS, PAGED, STRUCTS, Call


@dataclass(frozen=True)
class Bad:
    """Values of some fields that make a call wrong, and the field and text that the message must contain."""

    operation: str
    values: dict[str, int]
    named: str
    says: str = ""
    also: dict[str, int] = field(default_factory=dict)
    """Fields that have to follow for the bad one to be the only one."""

    def __str__(self) -> str:
        return f"{self.operation}-" + "-".join(f"{name}={value}" for name, value in self.values.items())


def outside(operation: str, name: str, low: int, high: int, *, largest: int, **also: int) -> Iterator[Bad]:
    """Yield the values just outside both ends of a range, and the ends of the field's own type."""
    smallest = -largest - 1
    for value in sorted({low - 1, smallest, high + 1, largest}):
        if (value < low or value > high) and smallest <= value <= largest:
            yield Bad(operation, {name: value}, name, f"{low}..", also)


def bad_numbers() -> Iterator[Bad]:
    for operation in NUMBERS:
        yield from outside(operation, "dtype", 0, 2, largest=INT32)
        yield from outside(operation, "batch", 1, 65535, largest=INT32)
        yield from outside(operation, "heads", 1, 65535, largest=INT32)
        yield from outside(operation, "kv_heads", 1, 4, largest=INT32)
        yield from outside(operation, "head_size", 16, 256, largest=INT32)
        yield from outside(operation, "capacity", 1, 2**20, largest=INT64)
        yield from outside(operation, "cache_format", 0, 4, largest=INT32)
        for value in (17, 20, 255):
            yield Bad(operation, {"head_size": value}, "head_size", "a multiple of 8")
        yield Bad(operation, {"kv_heads": 3}, "heads", "a multiple of 3 (kv_heads)")
        yield Bad(operation, {"heads": 17, "kv_heads": 1}, "heads / kv_heads", "1..16")
        yield Bad(operation, {"heads": 65535, "batch": 65535}, "batch * heads", f"1..{INT32}", {"kv_heads": 13107})
        for size in (0, 8, ctypes.sizeof(STRUCTS[operation]) - 8, ctypes.sizeof(STRUCTS[operation]) + 8, 2**64 - 1):
            yield Bad(operation, {"struct_bytes": size}, "struct_bytes", str(ctypes.sizeof(STRUCTS[operation])))
    yield from bad_numbers_of_compact()
    yield from bad_numbers_of_attention()


def bad_numbers_of_compact() -> Iterator[Bad]:
    name = "kvc_compact"
    yield from outside(name, "window", 1, 1024, largest=INT32)
    yield Bad(name, {"window": 9}, "window", "1..8 (prompt_budget)")
    yield from outside(name, "pool_kernel", 1, 4095, largest=INT32)
    yield Bad(name, {"pool_kernel": 2}, "pool_kernel", "an odd number")
    yield Bad(name, {"pool_kernel": 4094}, "pool_kernel", "an odd number")
    yield from outside(name, "page_size", 1, INT32, largest=INT32)
    yield from outside(name, "fp8_bounds", 0, 1, largest=INT32)
    yield from outside(name, "by_length", 0, 1, largest=INT32)
    yield from outside(name, "reserved", 0, 0, largest=INT32)
    yield from outside(name, "prompt_length", 1, 2**20, largest=INT64)
    yield from outside(name, "prompt_budget", 1, 24, largest=INT64)
    for stride in ("kv_stride_batch", "kv_stride_head", "kv_stride_token"):
        yield from outside(name, stride, 16, INT64, largest=INT64)
        for value in (17, 20, 31, 385, INT64):
            yield Bad(name, {stride: value}, stride, "a multiple of 8")
        yield Bad(name, {stride: INT64 - 7}, "k", "overflows")
    # Each stride fits; the place of the last element does not.
    yield Bad(name, {"kv_stride_batch": 2**60, "kv_stride_head": 2**60}, "k", "overflows")


def bad_numbers_of_attention() -> Iterator[Bad]:
    for name in PAGED:
        yield from bad_numbers_of_pages(name)
        yield from outside(name, "recent", 0, 8, largest=INT32)


def bad_numbers_of_pages(name: str) -> Iterator[Bad]:
    yield from outside(name, "page_size", 1, INT32, largest=INT32)
    yield from outside(name, "fp8_bounds", 0, 1, largest=INT32)
    yield from outside(name, "top_r", 1, 16, largest=INT32)
    yield from outside(name, "top_k", 1, 24, largest=INT64)
    yield from outside(name, "token_budget", 0, INT32, largest=INT64)
    yield from outside(name, "dense_until", 0, INT32, largest=INT64)
    for value in (-1, 0, 11, 13, INT64):
        yield Bad(name, {"selected_width": value}, "selected_width", "12..12")
    yield Bad(name, {"top_k": 20}, "selected_width", "20..20")


@pytest.mark.parametrize("bad", list(bad_numbers()), ids=str)
def test_bad_numbers_are_refused_by_name(library: KernelLibrary, bad: Bad) -> None:
    """Refused by the operation and by its workspace query alike, in the words of the header."""
    call = Call(library, bad.operation)
    for name, value in {**bad.also, **bad.values}.items():
        setattr(call.params, name, value)
    text = call.refused(call.run)
    assert text.startswith(f"{bad.named} "), text
    assert bad.says in text, text
    assert "; expected " in text, text
    if "overflows" not in text and "/" not in bad.named and bad.named in bad.values:
        assert f"{bad.named} is {bad.values[bad.named]};" in text
    assert call.workspace_refusal() == text


def test_every_number_is_tried() -> None:
    tried = {(bad.operation, name) for bad in bad_numbers() for name in bad.values}
    for operation, struct in STRUCTS.items():
        names = {name for name, kind in struct._fields_ if kind is not ctypes.c_void_p}
        assert names - {"struct_bytes"} == set(NUMBERS[operation])
        assert {(operation, name) for name in names} <= tried


@pytest.mark.parametrize("operation", list(STRUCTS))
def test_the_largest_sizes_do_not_overflow(library: KernelLibrary, operation: str) -> None:
    """Every number at its upper end: no size wraps, and buffers of 2^61 bytes overlap wherever they are."""
    call = Call(library, operation)
    large = {"batch": 65535, "heads": 32767, "kv_heads": 32767, "head_size": 256, "capacity": 2**20}
    if operation == "kvc_compact":
        strides = {f"kv_stride_{axis}": 256 for axis in ("batch", "head", "token")}
        large |= {"prompt_length": 2**20, "prompt_budget": 2**20 - 1, "page_size": 1, "window": 1024, **strides}
    if operation in PAGED:
        large |= {"page_size": 1, "top_r": 256, "top_k": 2**20, "selected_width": 2**20}
    for name, value in large.items():
        setattr(call.params, name, value)
    assert 2**40 < library.workspace_bytes(operation, call.params) < 2**63
    assert "memory apart from" in call.refused(call.run)


def test_a_tensor_of_more_than_2_to_the_63_bytes_is_refused(library: KernelLibrary) -> None:
    """The one tensor whose numbers may each be in range and yet make more than 2^63 bytes."""
    call = Call(library, "kvc_hybrid_attention")
    for name, value in {"batch": 65535, "heads": 32767, "kv_heads": 32767}.items():
        setattr(call.params, name, value)
    call.params.token_budget = call.params.selected_width = INT32
    text = call.refused(call.run)
    assert text == "selected overflows; expected at most 2^63-1 bytes"
    assert call.workspace_refusal() == text
