"""One decode step for a fixed number of rows over fixed memory, captured as a CUDA graph and replayed with one call.

A step is about four hundred kernels; queuing them one by one from Python takes several times as long as running them.
If a step cannot be captured, its body is called directly, and the reason is logged. Between steps the host writes one
small buffer (tokens, positions, lengths) and reads the best token of each row, the tokens that were drawn (drawing.py),
or all logits. Nothing else waits for the device. A pass over drafts is a step of several tokens of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.backends.torch.model.capturer import Capturer
from kvc_trt.backends.torch.model.decoder import TorchDecoder
from kvc_trt.backends.torch.model.drawing import CHANGES, DrawVariant, StaticDrawing
from kvc_trt.backends.torch.nodes.caches import State
from kvc_trt.runtime.executor import NO_DRAW, NOT_FINITE, Answer

if TYPE_CHECKING:
    from kvc_trt.runtime.sampling.draw_rules import DrawRules

INACTIVE = -1
"""The cache length of an inactive row, which is not changed and whose logits have no meaning."""


class StaticStep:
    """The step of the first `rows` rows of a state; with fewer rows fed, the others are inactive.

    Each row is fed `count` known tokens, one after the other: a single one, or those of a draft pass.
    """

    def __init__(
        self, decoder: TorchDecoder, state: State, rows: int, device: torch.device, capturer: Capturer, *,
        count: int = 1,
    ) -> None:  # fmt: skip
        caches, on_gpu = decoder.caches, device.type == "cuda"
        self.rows, self.count = rows, count
        self._decoder, self._device, self._capturer = decoder, device, capturer
        self._state = {name: buffer[:rows] for name, buffer in state.items()}
        self._inputs = torch.zeros(count + 1 + caches, rows, dtype=torch.int64, device=device)
        self._staging = torch.zeros(self._inputs.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._logits = torch.zeros(count * rows, decoder.config.vocab_size, device=device)
        """The logits [count*rows,vocab] after each token of each row; the first token of all rows comes first."""
        self._best = torch.zeros(count * rows, dtype=torch.int64, device=device)
        self._host_logits = torch.zeros(self._logits.shape, pin_memory=on_gpu) if on_gpu else self._logits
        self._host_best = torch.zeros(count * rows, dtype=torch.int64, pin_memory=on_gpu) if on_gpu else self._best
        self._copied: Any = torch.cuda.Event() if on_gpu else None
        self._inputs[count + 1 :] = INACTIVE  # a capture runs the step, which must not change the state
        self._replay = capturer.capture(self._body)

    def run(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]) -> None:
        """Queue one step of n <= rows rows: tokens [n] or [count,n], positions [n], cache_lengths [caches,n]."""
        fed, given, count = self._staging.numpy(), len(positions), self.count
        if self._copied is not None:
            self._copied.synchronize()  # the queued step before this one may not have read its inputs yet
        fed[: count + 1], fed[count + 1 :] = 0, INACTIVE
        fed[:count, :given], fed[count, :given], fed[count + 1 :, :given] = tokens, positions, cache_lengths
        self._inputs.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._replay()

    def logits(self, rows: int) -> NDArray[np.float32]:
        """Wait for the step and return logits [rows,vocab], or [count,rows,vocab]; valid until the next call."""
        if self.count == 1:
            return self._fetched(self._host_logits, self._logits, rows)
        every = self._fetched(self._host_logits, self._logits, len(self._logits))
        return every.reshape(self.count, self.rows, -1)[:, :rows]

    def best(self, rows: int) -> NDArray[np.int64]:
        """Wait for the step; return each row's best token, the lowest of equals, or NOT_FINITE.

        The result is valid until the next call."""
        return self._fetched(self._host_best, self._best, rows)

    def drawn(self, rules: Iterable[Sequence[DrawRules | None]]) -> list[list[Answer]]:
        """Wait for the step; return the answer after each token of each row, [rows][count], valid until the next call.

        `rules` are those of the draws after the first tokens of each row. For None, and for rules that change too many
        tokens, the answer is the logits; for tokens beyond the rules it is NO_DRAW.
        """
        given = list(rules)
        flat: list[DrawRules | None] = [None] * (len(given) and (self.count - 1) * self.rows + len(given))
        for row, of_row in enumerate(given):
            for step, rule in enumerate(of_row):
                flat[step * self.rows + row] = rule if rule is not None and len(rule.changed) <= CHANGES else None
        drawn = self._drawing.run(flat)
        return [
            [
                NO_DRAW if step >= len(of_row)
                else drawn[place] if flat[place := step * self.rows + row] is not None
                else self._logits_of(place)
                for step in range(self.count)
            ]
            for row, of_row in enumerate(given)
        ]  # fmt: skip

    def prepare_draws(self) -> None:
        """Capture the draws that most requests need: with and without top-k or top-p, with unchanged logits."""
        for filters in (False, True):
            self._drawing.prepare(DrawVariant(changes_logits=False, filters=filters, logprobs=False))

    @cached_property
    def _drawing(self) -> StaticDrawing:
        return StaticDrawing(self._logits, self._capturer)

    def _logits_of(self, place: int) -> NDArray[np.float32]:
        """Return one row of the logits on the host."""
        if self._host_logits is not self._logits:
            self._host_logits[place].copy_(self._logits[place])
        found: NDArray[np.float32] = self._host_logits[place].numpy()
        return found

    def _body(self) -> None:
        count = self.count
        tokens, positions, lengths = self._inputs[:count], self._inputs[count], self._inputs[count + 1 :]
        with torch.inference_mode():
            if count == 1:
                logits = self._decoder.decode(tokens[0], positions, lengths, self._state)
            else:
                logits = self._decoder.check_draft(tokens, positions, lengths, self._state).flatten(0, 1)
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
