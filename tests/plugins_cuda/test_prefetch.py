"""Reading ahead into the L2 cache: it touches the bytes that are named and no others, and refuses bad ones."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from kvc_trt.kernels.c_library import ARCHITECTURES, KernelError
from kvc_trt.kernels.library import KernelLibrary
from tests.gpu import Gpu
from tests.plugins_cuda.toys import aligned


@pytest.mark.parametrize("count", [16, 2048, 2064, 65536, 65552, 3 * 65536 - 16])
def test_every_byte_is_asked_for_and_none_changes(emulation: KernelLibrary, count: int) -> None:
    values = np.random.default_rng(0).integers(0, 255, count, np.uint8)
    memory = aligned(count, np.uint8)
    memory[:] = values
    (launch,) = emulation.launches_of(lambda: emulation.prefetch(memory.ctypes.data, count))
    assert (memory == values).all()
    assert list(launch.grid) == [-(-count // 65536), 1, 1]


@pytest.mark.parametrize("count", [16, 2048, 65552])
def test_prefetch_reads_nothing_beyond_the_last_byte(emulation: KernelLibrary, count: int) -> None:
    """Prefetches up to the last byte before memory that does not exist: reading that would end the process."""
    pages = -(-count // mmap.PAGESIZE)
    mapped = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    view = np.frombuffer(mapped, np.uint8)
    guard = view.ctypes.data + pages * mmap.PAGESIZE
    protect(guard, 0)
    try:
        emulation.prefetch(guard - count, count)
    finally:
        protect(guard, mmap.PROT_READ | mmap.PROT_WRITE)


def protect(page: int, how: int) -> None:
    """Change the permitted accesses to one page of memory."""
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_int(how)) == 0


@pytest.mark.gpu
def test_a_gpu_takes_the_hint_outside_a_capture_and_inside(gpu: Gpu) -> None:
    """Nothing can be seen of it but that no byte changes and no launch is refused."""
    values = torch.arange(1 << 20, dtype=torch.int32).to(gpu.device)
    on_gpu = gpu.device == "cuda"

    def ahead() -> tuple[torch.Tensor, ...]:
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        gpu.library.prefetch(values.data_ptr(), values.nbytes, stream)
        return (values.sum(),)

    (before,) = ahead()
    replay, (after,) = gpu.captured(ahead)
    replay()
    assert int(before) == int(after) == (1 << 20) * ((1 << 20) - 1) // 2


@pytest.mark.parametrize("schedule", ["forward", "reverse", "shuffled"])
def test_prefetch_runs_in_every_schedule_on_every_gpu(emulation: KernelLibrary, schedule: str) -> None:
    memory = aligned(200_000, np.uint8)
    emulation.set_schedule(schedule, seed=3)
    try:
        for architecture in ARCHITECTURES:
            emulation.set_device(architecture)
            emulation.prefetch(memory.ctypes.data, 200_000)
    finally:
        emulation.set_device(ARCHITECTURES[0])
        emulation.set_schedule("forward")


@pytest.mark.parametrize(
    ("first", "count", "message"),
    [
        (0, 16, "first is null; expected an address"),
        (8, 16, "first is 0x8; expected a multiple of 16 bytes"),
        (16, 0, r"bytes is 0; expected 16\.\."),
        (16, -16, r"bytes is -16; expected 16\.\."),
        (16, 2**40 + 16, r"bytes is 1099511627792; expected 16\.\."),
        (16, 24, "bytes is 24; expected a multiple of 16"),
    ],
)
def test_bad_bytes_are_refused(emulation: KernelLibrary, first: int, count: int, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        emulation.prefetch(first, count)
