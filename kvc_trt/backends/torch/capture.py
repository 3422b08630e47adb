"""CUDA graphs: a body that works on fixed memory, recorded once and replayed with one call.

A decode step is some four hundred kernels; queued one by one from Python they would take several times as long as they
run. Where nothing can be captured the body itself is called instead, and the reason is in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)
Body = Callable[[], None]


class Capturer:
    """Captures bodies for one device. Graphs share their scratch memory: replay them one after the other only.

    `refused` says why nothing is captured (on a CPU there is nothing to capture, which is no refusal); a body that
    fails to be captured sets it, and is called as it is from then on.
    """

    def __init__(self, device: torch.device, refused: str | None = None) -> None:
        self._device, self._graphs = device, device.type == "cuda"
        self.refused: str | None = None
        self._pool: Any = None
        if self._graphs and refused is not None:
            self._refuse(refused)

    def capture(self, body: Body) -> Body:
        """What runs the body from now on. On a GPU the body is run here, twice or more: let it change nothing yet.

        It must use the same memory every time and never wait for the device.
        """
        if not self._graphs or self.refused is not None:
            return body
        self._warm_up(body)
        try:
            return self._captured(body).replay
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refuse(str(error).strip().partition("\n")[0] or "capture failed")
            return body

    def _warm_up(self, body: Body) -> None:
        """Everything that happens only once: modules loaded, libraries initialised, functions compiled."""
        side: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
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
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            body()
        return graph

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.warning("decode runs without a CUDA graph, several times slower at small batches: %s", reason)
