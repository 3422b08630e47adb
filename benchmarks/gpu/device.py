"""The GPU that a benchmark measures: everything that a sweep asks of it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.timing import Call, Timing
from kvc_trt.backends.torch.memory import free_bytes
from kvc_trt.kernels.library import KernelLibrary


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second that this GPU's memory reaches: the one denominator of floors, measured and predicted."""

    copied: float
    """Read and written together: for what writes about as much as it reads."""
    read: float
    """For steps, which read."""

    def figures(self) -> dict[str, float]:
        """Return the bandwidths under their names in a result."""
        return {"copy_bytes_per_second": self.copied, "read_bytes_per_second": self.read}


class Gpu:
    """This process's GPU."""

    emulated = False

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library

    @property
    def device(self) -> torch.device:
        """The device on which tensors are made."""
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    @property
    def free_bytes(self) -> int:
        return free_bytes(self.device)

    def record(self) -> dict[str, Any]:
        """Return the GPU as a result records it."""
        return gpu_timing.device_record()

    def copy_bandwidth(self) -> float:
        """Return the bytes per second of a copy, read and written together."""
        return gpu_timing.copy_bandwidth()

    def read_bandwidth(self) -> float:
        """Return the bytes per second of reading alone."""
        return gpu_timing.read_bandwidth()

    def bandwidths(self) -> Bandwidths:
        """Both; results are compared with them."""
        return Bandwidths(self.copy_bandwidth(), self.read_bandwidth())

    def measure_between(self, calls: Sequence[Call], other: Call, samples: int) -> Timing:
        """Time per call behind another one each. Raises gpu_timing.Throttled."""
        return gpu_timing.measure_between(calls, other, samples)

    def measure(self, calls: Sequence[Call], samples: int) -> Timing:
        """Time per call. Raises gpu_timing.Throttled."""
        return gpu_timing.measure(calls, samples)

    def kernel_times(self, calls: Sequence[Call]) -> dict[str, float]:
        """Microseconds of each kernel in one call."""
        return gpu_timing.kernel_times(calls)

    def clocks(self) -> str:
        """Return the driver's statement about the clocks. Raises gpu_timing.Throttled."""
        return gpu_timing.judge_clocks(gpu_timing.clock_reasons())

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Give freed memory back, so that the next point sees the memory that is really free."""
        gc.collect()
        torch.cuda.empty_cache()

    def watch_memory(self) -> int:
        """Begin to look for the peak of allocated bytes; returns the bytes allocated now."""
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """Most bytes that were allocated since `watch_memory`."""
        return torch.cuda.max_memory_allocated()

    def usable(self) -> bool:
        """Return True if this process can still use the GPU; after an illegal access CUDA refuses all further calls."""
        try:
            torch.zeros(1, device=self.device)
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def publishable(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a point's figures that may be written into a result."""
        return dict(figures)
