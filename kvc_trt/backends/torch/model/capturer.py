"""Capture functions in CUDA graphs, which one call replays; if a capture is refused, call them directly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kvc_trt.kernels.c_library import KernelError

log = logging.getLogger(__name__)
Body = Callable[[], None]


class Capturer:
    """Captures functions for one device. Graphs share scratch memory, so never replay two at once.

    `refused` is the reason why nothing is captured (None on a CPU, where there is nothing to capture). A failed capture
    sets it, and functions are called directly from then on.
    """

    def __init__(self, device: torch.device, refused: str | None = None) -> None:
        self._device, self._graphs = device, device.type == "cuda"
        self.refused: str | None = None
        self._pool: Any = None
        if self._graphs and refused is not None:
            self._refuse(refused)

    @property
    def captures(self) -> bool:
        """True if functions are captured, so that a step for more rows may serve fewer."""
        return self._graphs and self.refused is None

    def capture(self, body: Body) -> Body:
        """Return a function that runs the body. On a GPU the body is run here at least twice: it must not change state.

        It must use the same memory every time and never wait for the device.
        """
        if not self.captures:
            return body
        self._warm_up(body)
        try:
            return self._captured(body).replay
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, KernelError) as error:
            self._refuse(str(error).strip().partition("\n")[0] or "capture failed")
            return body

    def _warm_up(self, body: Body) -> None:
        """Run the body before the capture, to load modules, initialise libraries and compile functions."""
        side: Any = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                body()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)

    def _captured(self, body: Body) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Only this thread's calls end the capture: another one may allocate, or ask for the memory that is free.
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), capture:
            body()
        return graph

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.warning("decode runs without a CUDA graph, several times slower at small batches: %s", reason)
