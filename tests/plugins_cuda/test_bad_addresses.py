"""Every pointer of every parameter struct, and the workspace, null, misaligned, too small or where another one is.

All are refused by name, and nothing is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.structs import Status
from tests.plugins_cuda.bad_calls import PAGED, POINTERS, STRUCTS, ZONE, Call

IN_PLACE = " (in place: v_cache is v, k is contiguous with S = C, no format)"


def bad_addresses(operation: str) -> Iterator[tuple[str, str, str]]:
    """Triples of pointer, its mistake, and the text of the message."""
    for name, pointer in POINTERS[operation].items():
        if not pointer.optional:
            yield name, "null", f"{name} is null; expected an address"
        step = 1
        while step < pointer.alignment:
            yield name, f"off by {step}", f"a multiple of {pointer.alignment} bytes"
            step *= 2


@pytest.fixture(params=list(STRUCTS))
def call(request: pytest.FixtureRequest, library: KernelLibrary) -> Call:
    return Call(library, request.param)


@pytest.mark.parametrize(
    ("operation", "name", "wrong", "says"), [(o, *bad) for o in STRUCTS for bad in bad_addresses(o)]
)
def test_null_and_misaligned_addresses_are_refused_by_name(
    library: KernelLibrary, operation: str, name: str, wrong: str, says: str
) -> None:
    call = Call(library, operation)
    right = getattr(call.params, name)
    setattr(call.params, name, None if wrong == "null" else right + int(wrong.removeprefix("off by ")))
    text = call.refused(call.run)
    assert text.startswith(f"{name} is "), text
    assert says in text, text
    assert library.workspace_bytes(operation, call.params) == call.needed, "a workspace is a function of sizes alone"


def test_every_address_is_tried() -> None:
    for operation, struct in STRUCTS.items():
        addresses = {name for name, kind in struct._fields_ if kind is ctypes.c_void_p}
        assert {name for name in addresses if not name.endswith(("_scale", "_minimum"))} == set(POINTERS[operation])


@pytest.mark.parametrize("operation", list(STRUCTS))
def test_overlapping_buffers_are_refused(library: KernelLibrary, operation: str) -> None:
    """Covers any two buffers, one of them written: equal addresses, and the end of one under the other's start."""
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
    """A row of 6 pages has room for 16: another buffer may begin right behind them, and not before."""
    call = Call(library, operation)
    call.params.fp8_bounds = 1
    call.bytes = library.workspace_bytes(operation, call.params)
    assert call.bytes <= call.needed + ZONE
    end = call.params.bounds + 2 * 2 * 32 * 16
    call.params.v_cache = end - 16
    assert "memory apart from" in call.refused(call.run)
    call.params.v_cache = end
    call.run()


@pytest.mark.parametrize(
    ("form", "bytes_", "scales", "minima"), [(1, 16, 2, 0), (2, 16, 1, 0), (3, 8, 2, 2)], ids=["int8", "fp8", "int4"]
)
def test_parts_of_a_format_take_their_own_bytes(
    library: KernelLibrary, form: int, bytes_: int, scales: int, minima: int
) -> None:
    """Codes, scales and minima of 2 x 2 x 24 vectors of 16 channels: other memory may begin right behind each of them.

    An address of minima that the format does not have is not looked at."""
    call, vectors = Call(library, "kvc_dense_attention"), 2 * 2 * 24
    call.params.cache_format = form
    text = call.refused(call.run)
    assert text.startswith("k_scale is null")
    start, parts = call.params.k_cache, {}
    for name, size in (("k_scale", scales), ("v_scale", scales), ("k_minimum", minima), ("v_minimum", minima)):
        parts[name] = call._allocate(name, max(vectors * size, 16))
        setattr(call.params, name, parts[name] if size else 1)
    call.params.v_cache = start + vectors * bytes_ - 16
    assert "memory apart from" in call.refused(call.run)
    call.params.v_cache = start + vectors * bytes_
    call.params.v_scale = parts["k_scale"] + vectors * scales - scales
    assert "memory apart from" in call.refused(call.run)
    call.params.v_scale = parts["k_scale"] + vectors * scales
    if scales > 1:
        call.params.v_scale += 1
        assert "a multiple of 2 bytes" in call.refused(call.run)
        call.params.v_scale -= 1
    call.memory["cache_lengths"].zero_()
    call.run()


def test_inputs_may_share_memory(library: KernelLibrary) -> None:
    call = Call(library, "kvc_dense_attention")
    call.memory["cache_lengths"].zero_()
    call.params.v_new = call.params.k_new
    call.run()


def test_compaction_partly_in_place_is_refused(library: KernelLibrary) -> None:
    """In place means k_cache = k, v_cache = v, and the cache's strides: two of the three are not enough."""
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


def test_a_workspace_that_is_too_small_is_refused(call: Call) -> None:
    for size in (0, 1, call.needed - 1):
        call.bytes = size
        text = call.refused(call.run, Status.WORKSPACE_TOO_SMALL)
        assert text == f"workspace_bytes is {size}; expected at least {call.needed}"


def test_null_and_misaligned_workspaces_are_refused(call: Call) -> None:
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


def test_null_structs_and_results_are_refused(call: Call) -> None:
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
