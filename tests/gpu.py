"""The GPU of the tests that are marked `gpu`, or the emulation that stands in for it.

KVC_TRT_GPU_TESTS=emulation runs every one of them against the emulated kernels, on a CPU: so each is known to work
apart from the device. This cannot show a tensor left on the wrong device, or an operation that CUDA refuses to capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvc_trt.backends.torch.model.capturer import Body, Capturer
from kvc_trt.kernels.library import KernelLibrary

VARIABLE = "KVC_TRT_GPU_TESTS"


def asked_for(config: pytest.Config) -> bool:
    """True if tests on a GPU are part of this run: with `-m gpu`, and wherever the variable is set."""
    chosen: str = config.option.markexpr
    return VARIABLE in os.environ or ("gpu" in chosen and "not gpu" not in chosen)


def executor() -> str:
    """Return the executor of the library for tests on a GPU: "cuda", or "emulation" where the emulation stands in."""
    chosen = os.environ.get(VARIABLE, "cuda")
    assert chosen in ("cuda", "emulation"), f"{VARIABLE} is {chosen}; expected emulation, or nothing"
    return chosen


class StandInCapturer(Capturer):
    """Runs a body before its first use as often as a capture does, and takes part in what is chosen for captures."""

    captures = True

    def capture(self, body: Body) -> Body:
        body()
        body()
        return body


@dataclass(frozen=True)
class Gpu:
    """The device of one test with its kernel library."""

    library: KernelLibrary

    @property
    def device(self) -> str:
        """ "cuda", or "cpu" where the emulation stands in."""
        return self.library.device_type

    def capturer(self) -> Capturer:
        """Return a capturer of steps."""
        device = torch.device(self.device)
        return Capturer(device) if device.type == "cuda" else StandInCapturer(device)

    def captured(
        self, body: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[Callable[[], Any], tuple[torch.Tensor, ...]]:
        """(what replays the body over the same memory, its results in that memory); the body may run beforehand."""
        if self.device == "cuda":
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(side):
                body()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                results = body()
            return graph.replay, results
        results = body()

        def replay() -> None:
            for held, new in zip(results, body(), strict=True):
                held.copy_(new)

        return replay, results
