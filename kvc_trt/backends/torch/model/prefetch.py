"""Read the weights of the next products into the L2 cache while attention runs.

At a small batch, attention waits for latencies and leaves the memory idle. A captured step uses that time: its graph
gets a side branch that reads ahead, for which nothing waits but the end of the step. Results do not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvc_trt.kernels.loading import current_library
from kvc_trt.kernels.switches import WEIGHT_PREFETCH

if TYPE_CHECKING:
    from kvc_trt.kernels.c_library import CLibrary

OLDEST = (9, 0)
"""The first GPUs, by compute capability, with the instruction that the kernel uses."""
UNIT = 16
"""Bytes that are read ahead are a multiple of this."""


class WeightPrefetch:
    """Reads ahead on the stream `side`, at most `room` bytes at a time."""

    def __init__(self, library: CLibrary, side: Any, room: int) -> None:
        self._library, self._side, self._room = library, side, room
        self._open = False

    def launch_once(self, device: torch.device) -> None:
        """Launch the kernel on a few bytes: its first launch would otherwise be inside a capture."""
        some = torch.zeros(UNIT, dtype=torch.uint8, device=device)
        self._library.prefetch(some.data_ptr(), some.nbytes, torch.cuda.current_stream().cuda_stream)

    def start(self, *matrices: Tensor) -> None:
        """Read the first bytes of contiguous matrices, in this order, until the cache is full.

        Only in a capture, and unless it is switched off (`KVC_TRT_WEIGHT_PREFETCH`) when the capture is made.
        """
        if not WEIGHT_PREFETCH.is_on or not torch.cuda.is_current_stream_capturing():
            return
        self._side.wait_stream(torch.cuda.current_stream())
        self._open, room = True, self._room
        for matrix in matrices:
            count = min(matrix.nbytes, room) // UNIT * UNIT
            if count:
                self._library.prefetch(matrix.data_ptr(), count, self._side.cuda_stream)
            room -= count

    def end(self) -> None:
        """Bring the side branch back: a capture ends on the stream on which it began."""
        if self._open:
            torch.cuda.current_stream().wait_stream(self._side)
        self._open = False


def weight_prefetch(device: torch.device) -> WeightPrefetch | None:
    """Return the object that reads ahead on this device; None on a CPU, on an older GPU or without the CUDA kernels."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        return None
    library = current_library()
    if library is None or library.device_type != "cuda":
        return None
    # Half of the cache: the other half is for the caches' entries, the activations, and earlier reads.
    room = int(torch.cuda.get_device_properties(device).L2_cache_size) // 2
    side: Any = torch.cuda.Stream(device)
    ahead = WeightPrefetch(library, side, room)
    ahead.launch_once(device)
    return ahead
