"""Every field of every parameter struct with a bad value: refused by name, and nothing is written.

The tables below say what each field may hold; the calls are generated from them, and a field without an entry fails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvc_trt.kernels.c_library import KernelError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.rotated import ROTATED_DENSE_ATTENTION, ROTATED_HYBRID_ATTENTION
from kvc_trt.kernels.structs import Parameters, Status, struct_of
from kvc_trt.operators.compact import COMPACT
from kvc_trt.operators.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.hybrid_attention import HYBRID_ATTENTION

INT32, INT64 = 2**31 - 1, 2**63 - 1
FILL, ZONE = 0x5A, 8192
IN_PLACE = " (in place: v_cache is v, and k is contiguous with S = C)"
# One small call that every library accepts: B 2, H 4, G 2, D 16, W 4, S = C 24, p 4.
SHAPE = {"dtype": 0, "batch": 2, "heads": 4, "kv_heads": 2, "head_size": 16}
NUMBERS = {
    "kvc_compact": {
        **SHAPE, "window": 4, "pool_kernel": 3, "page_size": 4, "fp8_bounds": 0, "reserved": 0, "prompt_length": 24,
        "prompt_budget": 8, "capacity": 24, "kv_stride_batch": 768, "kv_stride_head": 384, "kv_stride_token": 16,
    },
    "kvc_hybrid_attention": {
        **SHAPE, "page_size": 4, "top_r": 8, "fp8_bounds": 0, "capacity": 24, "top_k": 8, "token_budget": 12,
        "dense_until": 10, "selected_width": 12,
    },
    "kvc_dense_attention": {**SHAPE, "reserved": 0, "capacity": 24},
}  # fmt: skip
PAGED, ROTATED = ("kvc_hybrid_attention", "kvc_rotated_hybrid_attention"), "kvc_rotated_dense_attention"
NUMBERS |= {PAGED[1]: NUMBERS[PAGED[0]], ROTATED: NUMBERS["kvc_dense_attention"]}
STRUCTS: dict[str, type[Parameters]] = {
    "kvc_compact": struct_of(COMPACT),
    "kvc_hybrid_attention": struct_of(HYBRID_ATTENTION),
    "kvc_dense_attention": struct_of(DENSE_ATTENTION),
    "kvc_rotated_hybrid_attention": struct_of(ROTATED_HYBRID_ATTENTION),
    "kvc_rotated_dense_attention": struct_of(ROTATED_DENSE_ATTENTION),
}


@dataclass(frozen=True)
class Pointer:
    """A buffer of the call: bytes that it needs, and what the library does with it."""

    bytes: int
    alignment: int = 16
    written: bool = False
    optional: bool = False


CACHE, BOUNDS = Pointer(2 * 2 * 24 * 16 * 4, written=True), 2 * 2 * 32 * 6 * 4
STEP = {
    "query": Pointer(2 * 4 * 16 * 4),
    "k_new": Pointer(2 * 2 * 16 * 4),
    "v_new": Pointer(2 * 2 * 16 * 4),
    "k_cache": CACHE,
    "v_cache": CACHE,
    "cache_lengths": Pointer(2 * 8, alignment=8),
    "output": Pointer(2 * 4 * 16 * 4, written=True),
}
POINTERS = {
    "kvc_compact": {
        "q_window": Pointer(2 * 4 * 4 * 16 * 4),
        "k": Pointer(2 * 2 * 24 * 16 * 4),
        "v": Pointer(2 * 2 * 24 * 16 * 4),
        "prompt_lengths": Pointer(2 * 8, alignment=8),
        "k_cache": CACHE,
        "v_cache": CACHE,
        "bounds": Pointer(BOUNDS, written=True, optional=True),
        "cache_lengths": Pointer(2 * 8, alignment=8, written=True),
        "indices": Pointer(2 * 2 * 24 * 4, alignment=4, written=True),
    },
    "kvc_hybrid_attention": {
        **STEP,
        "bounds": Pointer(BOUNDS, written=True),
        "selected": Pointer(2 * 2 * 12 * 4, alignment=4, written=True, optional=True),
    },
    "kvc_dense_attention": STEP,
}
TOKEN = {
    "joined": Pointer(2 * 8 * 16 * 4),
    "cosines": Pointer(2 * 8 * 4, alignment=4),
    "sines": Pointer(2 * 8 * 4, alignment=4),
    "query": Pointer(2 * 4 * 16 * 4, written=True),
}
for operation in PAGED[0], "kvc_dense_attention":
    kept = {name: pointer for name, pointer in POINTERS[operation].items() if name not in ("query", "k_new", "v_new")}
    POINTERS[operation.replace("kvc_", "kvc_rotated_")] = TOKEN | kept


@dataclass(frozen=True)
class Bad:
    """Values of some fields that make a call wrong, and what the message must say of which field."""

    operation: str
    values: dict[str, int]
    named: str
    says: str = ""
    also: dict[str, int] = field(default_factory=dict)
    """Fields that have to follow for the bad one to be the only one."""

    def __str__(self) -> str:
        return f"{self.operation}-" + "-".join(f"{name}={value}" for name, value in self.values.items())


def outside(operation: str, name: str, low: int, high: int, *, largest: int, **also: int) -> Iterator[Bad]:
    """Both ends of a range by one too many, and the ends of the field's own type."""
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
    for name in "kvc_dense_attention", ROTATED:
        yield from outside(name, "reserved", 0, 0, largest=INT32)


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


def bad_addresses(operation: str) -> Iterator[tuple[str, str, str]]:
    """(pointer, what is wrong with it, what the message says)."""
    for name, pointer in POINTERS[operation].items():
        if not pointer.optional:
            yield name, "null", f"{name} is null; expected an address"
        step = 1
        while step < pointer.alignment:
            yield name, f"off by {step}", f"a multiple of {pointer.alignment} bytes"
            step *= 2


class Call:
    """A valid call on poisoned memory, of which any field can be made wrong."""

    def __init__(self, library: KernelLibrary, operation: str) -> None:
        self.library, self.operation = library, operation
        self.memory: dict[str, Tensor] = {}
        addresses = {name: self._allocate(name, pointer.bytes) for name, pointer in POINTERS[operation].items()}
        self.params = STRUCTS[operation](**NUMBERS[operation], **addresses)
        self.needed = library.workspace_bytes(operation, self.params)
        self.workspace: int | None = self._allocate("workspace", self.needed)
        self.bytes = self.needed

    def _allocate(self, name: str, size: int) -> int:
        """In the middle of a buffer so large that no other one of the call is near."""
        self.memory[name] = torch.full((size + 2 * ZONE,), FILL, dtype=torch.uint8, device=self.library.device_type)
        middle = self.memory[name].data_ptr() + ZONE
        return middle - middle % 256

    def run(self) -> None:
        self.library.call(self.operation, self.params, self.workspace, self.bytes)

    def refused(self, call: Callable[[], object], status: Status = Status.INVALID_PARAMETER) -> str:
        """The message of a refusal, after a check that every byte is as it was."""
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.status == status, caught.value
        for name, buffer in self.memory.items():
            assert bool((buffer == FILL).all()), f"{name} was written"
        return str(caught.value).removeprefix(f"{self.operation}: ").removesuffix(f" ({status.name})")

    def workspace_refusal(self) -> str:
        """The message of a workspace query that is refused without its result being written."""
        text = self.refused(lambda: self.library.workspace_bytes(self.operation, self.params))
        return text.removeprefix(f"{self.operation}_workspace: ")


@pytest.fixture(params=list(STRUCTS))
def call(request: pytest.FixtureRequest, library: KernelLibrary) -> Call:
    return Call(library, request.param)


# ---- Numbers


@pytest.mark.parametrize("bad", list(bad_numbers()), ids=str)
def test_numbers(library: KernelLibrary, bad: Bad) -> None:
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
def test_largest_sizes(library: KernelLibrary, operation: str) -> None:
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


def test_sizes_in_bytes_that_overflow(library: KernelLibrary) -> None:
    """The one tensor whose numbers may each be in range and yet make more than 2^63 bytes."""
    call = Call(library, "kvc_hybrid_attention")
    for name, value in {"batch": 65535, "heads": 32767, "kv_heads": 32767}.items():
        setattr(call.params, name, value)
    call.params.token_budget = call.params.selected_width = INT32
    text = call.refused(call.run)
    assert text == "selected overflows; expected at most 2^63-1 bytes"
    assert call.workspace_refusal() == text


# ---- Addresses


@pytest.mark.parametrize(
    ("operation", "name", "wrong", "says"), [(o, *bad) for o in STRUCTS for bad in bad_addresses(o)]
)
def test_addresses(library: KernelLibrary, operation: str, name: str, wrong: str, says: str) -> None:
    call = Call(library, operation)
    right = getattr(call.params, name)
    setattr(call.params, name, None if wrong == "null" else right + int(wrong.removeprefix("off by ")))
    text = call.refused(call.run)
    assert text.startswith(f"{name} is "), text
    assert says in text, text
    assert library.workspace_bytes(operation, call.params) == call.needed, "a workspace is a function of sizes alone"


def test_every_address_is_tried() -> None:
    for operation, struct in STRUCTS.items():
        assert {name for name, kind in struct._fields_ if kind is ctypes.c_void_p} == set(POINTERS[operation])


@pytest.mark.parametrize("operation", list(STRUCTS))
def test_overlaps(library: KernelLibrary, operation: str) -> None:
    """Any two buffers of which one is written: the same address, and the last bytes of one under the other's first."""
    call, pointers = Call(library, operation), POINTERS[operation]
    for one, first in pointers.items():
        for other, second in pointers.items():
            if one == other or not (first.written or second.written):
                continue
            right = getattr(call.params, one)
            start = getattr(call.params, other)
            for address in (start, start + second.bytes - 16, start - first.bytes + 16):
                setattr(call.params, one, address)
                text = call.refused(call.run)
                refused, _, rest = text.partition(" is ")
                apart = rest.partition("; expected memory apart from ")[2].removesuffix(IN_PLACE)
                assert {refused, apart} == {one, other}, text
            setattr(call.params, one, right)


@pytest.mark.parametrize("operation", ["kvc_compact", *PAGED])
def test_bounds_in_fp8_take_a_byte_each(library: KernelLibrary, operation: str) -> None:
    """Of 16 pages, for as few as 6: another buffer may begin right behind them, and not before."""
    call = Call(library, operation)
    call.params.fp8_bounds = 1
    call.bytes = library.workspace_bytes(operation, call.params)
    assert call.bytes <= call.needed + ZONE
    end = call.params.bounds + 2 * 2 * 32 * 16
    call.params.v_cache = end - 16
    assert "memory apart from" in call.refused(call.run)
    call.params.v_cache = end
    call.run()


def test_inputs_may_share_memory(library: KernelLibrary) -> None:
    call = Call(library, "kvc_dense_attention")
    call.memory["cache_lengths"].zero_()
    call.params.v_new = call.params.k_new
    call.run()


def test_partly_in_place(library: KernelLibrary) -> None:
    """In place is k_cache = k, v_cache = v, and strides of the cache: two of the three are not enough."""
    for changes in ({"k_cache": "k"}, {"v_cache": "v"}, {"k_cache": "v", "v_cache": "k"}):
        call = Call(library, "kvc_compact")
        for name, source in changes.items():
            setattr(call.params, name, getattr(call.params, source))
        assert "memory apart from" in call.refused(call.run)
    for stride, value in (("kv_stride_token", 24), ("kv_stride_head", 392), ("kv_stride_batch", 776)):
        call = Call(library, "kvc_compact")
        call.params.k_cache, call.params.v_cache = call.params.k, call.params.v
        setattr(call.params, stride, value)
        assert IN_PLACE in call.refused(call.run)
    call = Call(library, "kvc_compact")
    call.params.k_cache, call.params.v_cache = call.params.k, call.params.v
    call.params.capacity = 32  # longer than the prompt
    assert IN_PLACE in call.refused(call.run)


# ---- Workspace and result


def test_workspace_too_small(call: Call) -> None:
    for size in (0, 1, call.needed - 1):
        call.bytes = size
        text = call.refused(call.run, Status.WORKSPACE_TOO_SMALL)
        assert text == f"workspace_bytes is {size}; expected at least {call.needed}"


def test_workspace_address(call: Call) -> None:
    right = call.workspace
    assert right is not None
    call.workspace = None
    assert call.refused(call.run) == "workspace is null; expected an address"
    for step in (1, 2, 4, 8):
        call.workspace = right + step
        assert call.refused(call.run).endswith("; expected a multiple of 16 bytes")


def test_workspace_is_a_multiple_of_256(call: Call) -> None:
    assert call.needed > 0
    assert call.needed % 256 == 0


def test_null_struct_and_result(call: Call) -> None:
    library, operation = call.library, call.operation
    handle = ctypes.CDLL(str(library.path))
    message = ctypes.create_string_buffer(256)
    query, run = getattr(handle, f"{operation}_workspace"), getattr(handle, operation)
    wanted = ctypes.c_uint64(7)
    assert query(None, ctypes.byref(wanted), message) == Status.INVALID_PARAMETER
    assert message.value.decode().startswith("params is null; expected a Kvc")
    assert wanted.value == 7
    assert query(ctypes.byref(call.params), None, message) == Status.INVALID_PARAMETER
    assert message.value == b"bytes is null; expected an address"
    arguments = (ctypes.c_void_p(call.workspace), ctypes.c_uint64(call.needed), None)
    assert run(None, *arguments, message) == Status.INVALID_PARAMETER
    assert message.value.decode().startswith("params is null; expected a Kvc")
    assert run(None, *arguments, None) == Status.INVALID_PARAMETER  # a caller may not want the message
