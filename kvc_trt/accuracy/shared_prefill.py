"""Engines of one model that prefill the same prompts: what they have in common is computed once per batch.

Prefill is nearly all of what a short answer to a long prompt costs, and dozens of policies read the same prompts. An
executor here takes the trunk's values from a store that remembers them, and runs its own head behind them
(`split_prefill`). What it returns is what the engine's whole prefill graph returns, bit for bit.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.accuracy.split_prefill import SplitPrefill, split_prefill
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph, read_graph
from kvc_trt.runtime.executor import Prefilled

if TYPE_CHECKING:
    from pathlib import Path

    from onnxruntime import InferenceSession

    from kvc_trt.engine.program import Program

Values = Mapping[str, NDArray[Any]]
Int64 = NDArray[np.int64]


REMEMBERED_BYTES = 2 << 30
"""Values that are remembered at most; prompts beyond that are computed again for every policy."""


class SharedPrefill:
    """The trunks of one weight file, and what they gave for the prompts of late.

    Engines announce what they will read (`split`) before the first of them runs: one run then serves all.
    """

    def __init__(self, weights_directory: Path) -> None:
        self._options = LoadOptions(threads=None, prepack=False)  # all cores: prompts are long
        self._weights_directory = weights_directory
        self._between: dict[str, set[str]] = {}
        self._sessions: dict[str, tuple[frozenset[str], InferenceSession]] = {}
        self._values: dict[tuple[str, str], Values] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self.runs = 0
        """Batches that were computed, not remembered."""

    def split(self, program: Program) -> SplitPrefill:
        """The two halves of an engine's prefill graph; the store notes what the second reads."""
        halves = split_prefill(read_graph(program.prefill))
        with self._lock:
            self._between.setdefault(halves.identity, set()).update(halves.between)
        return halves

    def values(self, halves: SplitPrefill, input_ids: Int64, prompt_lengths: Int64) -> Values:
        """The logits, and every value that announced heads read, of prompts [B,S] of lengths [B]."""
        digest = hashlib.sha256(input_ids.tobytes() + prompt_lengths.tobytes()).hexdigest()
        key = halves.identity, f"{input_ids.shape}{digest}"
        with self._lock:
            found = self._values.get(key, {})
            if not set(halves.between) <= found.keys():
                found = self._run(halves, input_ids, prompt_lengths)
                self._remember(key, found)
            return found

    def types(self, halves: SplitPrefill) -> dict[str, str]:
        """ONNX Runtime's names of the element types of the trunk's values."""
        with self._lock:
            return {output.name: output.type for output in self._session(halves).get_outputs()}

    def forget(self) -> None:
        """Drop the remembered values: the next prompts are others."""
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def _remember(self, key: tuple[str, str], values: Values) -> None:
        size = sum(array.nbytes for array in values.values())
        if self._bytes + size <= REMEMBERED_BYTES:
            self._values[key] = values
            self._bytes += size

    def _run(self, halves: SplitPrefill, input_ids: Int64, prompt_lengths: Int64) -> Values:
        session = self._session(halves)
        names = [output.name for output in session.get_outputs()]
        self.runs += 1
        values = session.run(names, {"input_ids": input_ids, "prompt_lengths": prompt_lengths})
        return dict(zip(names, values, strict=True))

    def _session(self, halves: SplitPrefill) -> InferenceSession:
        """The trunk with every announced value as an output; loaded again when an engine announced more."""
        wanted = frozenset(self._between[halves.identity])
        loaded = self._sessions.get(halves.identity)
        if loaded is None or loaded[0] != wanted:
            session = load_graph(lambda: halves.trunk(sorted(wanted)), self._weights_directory, self._options)
            loaded = self._sessions[halves.identity] = wanted, session
        return loaded[1]


class SharingExecutor(OnnxRuntimeExecutor):
    """An engine whose prefill begins in the store; decoding is its own."""

    def __init__(self, program: Program, shared: SharedPrefill, halves: SplitPrefill, *, threads: int | None) -> None:
        super().__init__(program, threads=threads)
        self._shared, self._halves = shared, halves

    @cached_property
    def prefill_session(self) -> InferenceSession:
        """The head alone."""
        types = self._shared.types(self._halves)
        options = LoadOptions(self._threads, prepack=False)
        return load_graph(lambda: self._halves.head(types), self.program.weights_path.parent, options)

    def prefill(self, input_ids: Int64, prompt_lengths: Int64) -> Prefilled:
        """Run the prompts; the rows' state is [B, ...] per state tensor."""
        values = self._shared.values(self._halves, input_ids, prompt_lengths)
        feeds = {"input_ids": input_ids, "prompt_lengths": prompt_lengths, **values}
        names = ["cache_lengths", *(tensor.name for tensor in self.program.state)]
        wanted = {value.name for value in self.prefill_session.get_inputs()}
        found = self.prefill_session.run(names, {name: feeds[name] for name in wanted})
        state = dict(zip(names, found, strict=True))
        return Prefilled(values["logits"], state.pop("cache_lengths"), state)
