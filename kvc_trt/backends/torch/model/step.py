"""One decode step for a fixed number of rows over fixed memory, captured as a CUDA graph and replayed with one call.

A step is about four hundred kernels; queuing them one by one from Python takes several times as long as running them.
If a step cannot be captured, its body is called directly, and the reason is logged. Between steps the host writes one
small buffer (tokens, positions, lengths) and reads the best token of each row, or all logits. Nothing else waits for
the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.backends.torch.model.decoder import TorchDecoder
from kvc_trt.backends.torch.nodes.caches import State
from kvc_trt.runtime.executor import NOT_FINITE

log = logging.getLogger(__name__)
Body = Callable[[], None]


class Capturer:
    """Captures functions for one device. Graphs share scratch memory, so never replay two at once.

    `refused` says why nothing is captured (None on a CPU, where there is nothing to capture). If a capture fails, it
    is set, and functions are called directly from then on.
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
        except RuntimeError as error:
            self._refuse(str(error).strip().partition("\n")[0] or "capture failed")
            return body

    def _warm_up(self, body: Body) -> None:
        """Run once what happens only once: load modules, initialise libraries, compile functions."""
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


INACTIVE = -1
"""Cache length of an inactive row: it is not changed, and its logits are meaningless."""


class StaticStep:
    """The step of the first `rows` rows of a state; with fewer rows fed, the others are inactive."""

    def __init__(
        self, decoder: TorchDecoder, state: State, rows: int, device: torch.device, capturer: Capturer
    ) -> None:
        caches, on_gpu = decoder.caches, device.type == "cuda"
        self.rows = rows
        self._decoder, self._device = decoder, device
        self._state = {name: buffer[:rows] for name, buffer in state.items()}
        self._inputs = torch.zeros(2 + caches, rows, dtype=torch.int64, device=device)
        self._staging = torch.zeros(2 + caches, rows, dtype=torch.int64, pin_memory=on_gpu)
        self._logits = torch.zeros(rows, decoder.config.vocab_size, device=device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._host_logits = torch.zeros(self._logits.shape, pin_memory=on_gpu) if on_gpu else self._logits
        self._host_best = torch.zeros(rows, dtype=torch.int64, pin_memory=on_gpu) if on_gpu else self._best
        self._copied: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._inputs[2:] = INACTIVE  # a capture runs the step, which must not change the state
        self._replay = capturer.capture(self._body)

    def run(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]) -> None:
        """Queue one step of len(tokens) rows: tokens, positions [n], cache_lengths [caches,n], n <= rows."""
        fed, given = self._staging.numpy(), len(tokens)
        if self._copied is not None:
            self._copied.synchronize()  # what the step before it has queued may not have read its inputs yet
        fed[:2], fed[2:] = 0, INACTIVE
        fed[0, :given], fed[1, :given], fed[2:, :given] = tokens, positions, cache_lengths
        self._inputs.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._replay()

    def logits(self, rows: int) -> NDArray[np.float32]:
        """Wait for the step and return logits [rows,vocab], valid until the next call."""
        return self._fetched(self._host_logits, self._logits, rows)

    def best(self, rows: int) -> NDArray[np.int64]:
        """Wait for the step; return each row's best token, lowest of equals, or NOT_FINITE (until the next call)."""
        return self._fetched(self._host_best, self._best, rows)

    def _body(self) -> None:
        with torch.inference_mode():
            logits = self._decoder.decode(self._inputs[0], self._inputs[1], self._inputs[2:], self._state)
            self._logits.copy_(logits)
            highest, best = logits.max(dim=-1)
            self._best.copy_(torch.where(highest.isfinite(), best, NOT_FINITE))

    def _fetched(self, host: Tensor, found: Tensor, rows: int) -> NDArray[Any]:
        if self._device.type == "cuda":
            host[:rows].copy_(found[:rows], non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
        result: NDArray[Any] = host[:rows].numpy()
        return result


def rows_captured(rows: int, most: int) -> int:
    """Return the rows of the graph for `rows`: the next power of two, so that few graphs are needed."""
    return min(1 << (rows - 1).bit_length(), most)
