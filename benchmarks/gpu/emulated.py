"""The emulated kernels on a CPU in the place of a GPU: a sweep runs through all of its code, and measures nothing.

Every time is infinite: a result file refuses infinities (they are not JSON), so that none can be taken for a
measurement, and `publishable` leaves the other figures out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.timing import Call, Timing

NOTE = "emulated on a CPU: it ran to its end, and nothing was measured on a GPU"


class EmulatedGpu(Gpu):
    """No GPU. The library is the emulation."""

    emulated = True
    name = "no GPU, emulated kernels on a CPU"
    l2_bytes = 1
    device = torch.device("cpu")

    def record(self) -> dict[str, Any]:
        return {"gpu": None, "emulated": NOTE, "library": self.library.path.name}

    def copy_bandwidth(self) -> float:
        return math.inf

    def read_bandwidth(self) -> float:
        return math.inf

    def measure_between(self, calls: Sequence[Call], other: Call, samples: int) -> Timing:
        return self.measure([one for call in calls for one in (other, call)], samples)

    def measure(self, calls: Sequence[Call], samples: int) -> Timing:
        """Make each call as often as a capture and one replay would."""
        for _ in range(2):
            for call in calls:
                call()
        return Timing(math.inf, math.inf, samples, len(calls), "unknown")

    def kernel_times(self, calls: Sequence[Call]) -> dict[str, float]:
        calls[0]()
        return {}

    def clocks(self) -> str:
        return "unknown"

    def synchronize(self) -> None:
        """The emulation has ended when a call returns."""

    def release(self) -> None:
        """Nothing is kept."""

    def watch_memory(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def usable(self) -> bool:
        return True

    def publishable(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        return {"not_measured": NOTE}
