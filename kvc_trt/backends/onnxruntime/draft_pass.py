"""A pass over the tokens of a draft: the draft graph bound to the buffers that decode steps use, and its undoing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.onnxruntime.binding import bind_input, bind_output
from kvc_trt.backends.onnxruntime.loading import run_bound
from kvc_trt.graph.state import cache_sites, parts_in_step
from kvc_trt.runtime.executor import CheckedDraft

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

    from kvc_trt.engine.program import Program

Buffers = dict[str, NDArray[Any]]
Undo = dict[str, NDArray[Any]]


class DraftPass:
    """The draft graph of a program over state buffers [max_batch_size, ...], which it updates in place.

    The one buffer of a tensor is the graph's input and its output after each token, so nothing is copied.
    """

    def __init__(
        self, session: InferenceSession, program: Program, buffers: Buffers, expose: Sequence[str] = ()
    ) -> None:
        self._session, self._program, self._buffers, self._expose = session, program, buffers, expose
        self.exposed: dict[str, NDArray[Any]] = {}
        """The values `expose` of the latest run."""
        self._tokens = 1 + program.draft_tokens
        self._sites = cache_sites(program.model, program.parameters)
        self._sums = [f"{name}.{site.name}" for site in self._sites for name in site.parameters.selection.sums]
        self._bound_rows = 0

    def run(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> CheckedDraft:
        """Run the steps of `tokens` [1 + draft_tokens, rows] of the first rows."""
        rows = tokens.shape[1]
        if tokens.shape[0] != self._tokens:
            raise ValueError(f"tokens has shape {list(tokens.shape)}; expected {self._tokens} tokens per row")
        if rows != self._bound_rows:
            self._bind(rows)
        undo = [{name: self._buffers[name][row].copy() for name in self._sums} for row in range(rows)]
        self._inputs["token"][:], self._inputs["positions"][:] = tokens, positions
        self._inputs["cache_lengths"][:] = cache_lengths
        run_bound(self._session, self._binding)
        if self._expose:
            values = self._binding.get_outputs()[-len(self._expose) :]
            self.exposed = {name: value.numpy() for name, value in zip(self._expose, values, strict=True)}
        return CheckedDraft(self._logits, undo)

    def take_back(self, row: int, undo: Undo, cache_lengths: NDArray[np.int64], kept: int) -> None:
        """Undo the steps of one row except the first `kept`."""
        for site, before in zip(self._sites, cache_lengths.tolist(), strict=True):
            selection, end = site.parameters.selection, f".{site.name}"
            state = {part.name: self._buffers[part.name + end][row] for part in parts_in_step(site.parameters)}
            saved = {name: undo[name + end] for name in selection.sums}
            steps = range(before + kept, before + self._tokens)
            selection.take_back(state, saved, before, steps, site.parameters)

    def _bind(self, rows: int) -> None:
        limits = self._program.limits
        self._binding = self._session.io_binding()
        self._inputs = {
            "token": np.zeros((self._tokens, rows), np.int64),
            "positions": np.zeros(rows, np.int64),
            "cache_lengths": np.zeros((len(limits.capacities), rows), np.int64),
        }
        self._logits = np.zeros((self._tokens, rows, limits.vocab_size), np.float32)
        for name, array in self._inputs.items():
            bind_input(self._binding, name, array)
        bind_output(self._binding, "logits", self._logits)
        for tensor in (tensor for tensor in self._program.state if tensor.in_step):
            active = self._buffers[tensor.name][:rows]
            bind_input(self._binding, tensor.name, active)
            for name in tensor.outputs(self._tokens):
                bind_output(self._binding, name, active)
        for name in self._expose:
            self._binding.bind_output(name, "cpu")
        self._bound_rows = rows
