"""Engines of one model that prefill the same prompts compute the common part of their prefills once per prompt.

Prefill takes nearly all of the time of a short answer to a long prompt, and dozens of policies read the same prompts.
An executor here takes the values of its graph's trunk (`split_prefill.py`) from a store, and runs its own head on them.
Its results equal those of the engine's whole prefill graph for each prompt alone, bit for bit.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.onnxruntime.binding import bind_input, bind_output, return_freed_memory, shrinking
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph, run_bound
from kvc_trt.backends.onnxruntime.prefill.split_prefill import SplitPrefill, split_prefill
from kvc_trt.backends.onnxruntime.shared_weights import SharedWeights
from kvc_trt.engine.program import read_graph
from kvc_trt.files.atomic import disk_error
from kvc_trt.graph.prefill_parts import LOGITS
from kvc_trt.machine import usable_cores
from kvc_trt.runtime.executor import Prefilled

if TYPE_CHECKING:
    from pathlib import Path

    from onnxruntime import InferenceSession, OrtValue

    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine.program import Program

Value = Union["OrtValue", NDArray[Any]]
"""A value returned by ONNX Runtime, or an array in a file."""
Values = Mapping[str, Value]
Int64 = NDArray[np.int64]


REMEMBERED_BYTES = 2 << 30
"""The most bytes of values that are kept in memory; further values are kept in files beside the weights."""
PREPACK_UP_TO_BYTES = 64 << 20
"""Float weights up to this size are copied for the decode of every engine; dozens of engines are open at a time."""


class SharedPrefill:
    """The trunks of one weight file, and their values for recent prompts.

    Engines announce the values that they read (`split`) before the first of them runs, so that one run serves all.
    """

    def __init__(self, directory: Path) -> None:
        self._threads = usable_cores()  # all of them: prompts are long
        self._directory = directory
        self._weights: SharedWeights | None = None
        self._between: dict[str, set[str]] = {}
        self._sessions: dict[str, tuple[frozenset[str], InferenceSession]] = {}
        self._values: dict[tuple[str, str], Values] = {}
        self._in_memory: dict[tuple[str, str], int] = {}
        """Bytes of the values that are kept in memory."""
        self._lock = threading.Lock()
        self.runs = 0
        """The number of prompts that were computed rather than remembered."""

    def split(self, program: Program) -> SplitPrefill:
        """Return the two halves of an engine's prefill graph, and record the values that the second one reads."""
        halves = split_prefill(read_graph(program.prefill))
        with self._lock:
            self._weights = self._weights or SharedWeights(program.weight_file)
            self._between.setdefault(halves.identity, set()).update(halves.between)
        return halves

    def values(self, halves: SplitPrefill, input_ids: Int64, prompt_lengths: Int64) -> Values:
        """Return the logits of prompts [B,S] of lengths [B], and every value that announced heads read."""
        digest = hashlib.sha256(input_ids.tobytes() + prompt_lengths.tobytes()).hexdigest()
        key = halves.identity, f"{input_ids.shape}{digest}"
        with self._lock:
            found = self._values.get(key, {})
            if not set(halves.between) <= found.keys():
                self._drop(key)
                found = self._values[key] = self._kept(key, self._run(halves, input_ids, prompt_lengths))
            return found

    def types(self, halves: SplitPrefill) -> dict[str, str]:
        """Return ONNX Runtime's names of the element types of the trunk's values."""
        with self._lock:
            return {output.name: output.type for output in self._session(halves).get_outputs()}

    def forget(self) -> None:
        """Drop the stored values, because the next prompts are others."""
        with self._lock:
            self._values.clear()
            self._in_memory.clear()

    def _drop(self, key: tuple[str, str]) -> None:
        """Drop the values of one prompt."""
        self._values.pop(key, None)
        self._in_memory.pop(key, None)

    def _kept(self, key: tuple[str, str], values: Mapping[str, OrtValue]) -> Values:
        """Return the values unchanged, or mapped from files if the memory for them is used up."""
        size = sum(value.tensor_size_in_bytes() for value in values.values())
        if sum(self._in_memory.values()) + size <= REMEMBERED_BYTES:
            self._in_memory[key] = size
            return values
        return {name: _in_file(value.numpy(), self._directory) for name, value in values.items()}

    def _run(self, halves: SplitPrefill, input_ids: Int64, prompt_lengths: Int64) -> Mapping[str, OrtValue]:
        session = self._session(halves)
        names = [output.name for output in session.get_outputs()]
        self.runs += 1
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", input_ids)
        binding.bind_cpu_input("prompt_lengths", prompt_lengths)
        for name in names:
            binding.bind_output(name, "cpu")
        run_bound(session, binding, shrinking())
        return dict(zip(names, binding.get_outputs(), strict=True))

    def _session(self, halves: SplitPrefill) -> InferenceSession:
        """Return the trunk's session with every announced value as an output; it is reloaded if values were added."""
        wanted = frozenset(self._between[halves.identity])
        loaded = self._sessions.get(halves.identity)
        if loaded is None or loaded[0] != wanted:
            options = LoadOptions(self._threads, prepack=False, prefill="f32", weights=self._weights)
            session = load_graph(lambda: halves.trunk(sorted(wanted)), options)
            loaded = self._sessions[halves.identity] = wanted, session
        return loaded[1]


class SharingExecutor(OnnxRuntimeExecutor):
    """The executor of an engine whose prefill takes the trunk's values from the store."""

    def __init__(self, program: Program, shared: SharedPrefill, halves: SplitPrefill, options: RunOptions) -> None:
        super().__init__(program, options)
        self._shared, self._halves = shared, halves

    @property
    @override
    def prepacks_decode(self) -> bool:
        """True if decode copies its weights: quantised ones, which its prefill does not share, and small ones."""
        return self._quantised or self.program.weight_file.size <= PREPACK_UP_TO_BYTES

    @property
    @override
    def cuts_prefill(self) -> bool:
        """False: a prefill cannot run in slices, because the store computes the trunk at once."""
        return False

    @cached_property
    @override
    def prefill_session(self) -> InferenceSession:
        """ONNX Runtime's session of the head alone."""
        types = self._shared.types(self._halves)
        options = LoadOptions(self._options.threads, prepack=False, dtype=self.program.dtype, weights=self._weights)
        return load_graph(lambda: self._halves.head(types), options)

    @override
    def prefill(self, input_ids: Int64, prompt_lengths: Int64) -> Prefilled:
        """Run the prompts one by one; the rows' state is [B, ...] per state tensor.

        One row at a time takes half of a batch's time: its values are still in the processor's caches.
        """
        rows = len(prompt_lengths)
        logits = np.empty((rows, self._limits.vocab_size), np.float32)
        lengths = np.empty((len(self._limits.capacities), rows), np.int64)
        state: dict[str, NDArray[Any]] = {
            tensor.name: np.empty((rows, *tensor.shape), tensor.dtype) for tensor in self.program.state
        }
        for row in range(rows):
            one = slice(row, row + 1)
            into = {name: array[one] for name, array in state.items()}
            logits[one], lengths[:, one] = self._prefill_row(input_ids[one], prompt_lengths[one], into)
        return_freed_memory()
        return Prefilled(logits, lengths, state)

    def _prefill_row(
        self, input_ids: Int64, prompt_lengths: Int64, state: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.float32], Int64]:
        """Write one row's state in place; return its logits [1,vocab] and cache lengths [caches,1]."""
        ids, stored = np.ascontiguousarray(input_ids), np.empty((len(self._limits.capacities), 1), np.int64)
        values = self._shared.values(self._halves, ids, prompt_lengths)
        feeds: Values = {**values, "input_ids": ids, "prompt_lengths": prompt_lengths}
        session = self.prefill_session
        binding = session.io_binding()
        for name in (read.name for read in session.get_inputs()):
            if isinstance(value := feeds[name], np.ndarray):
                bind_input(binding, name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        for name, array in {"cache_lengths": stored, **state}.items():
            bind_output(binding, name, array)
        run_bound(session, binding, shrinking())
        logits = values[LOGITS]
        return logits if isinstance(logits, np.ndarray) else logits.numpy(), stored


class OnnxRuntimePrograms:
    """Opens engines that exist only in memory; with a store, their prefills share the trunk's values."""

    def __init__(self, options: RunOptions, shared: SharedPrefill | None) -> None:
        self._options, self._shared = options, shared

    def open(self, program: Program) -> OnnxRuntimeExecutor:
        """Return an executor of the program, and announce the values that it reads to the store."""
        if self._shared is None:
            return OnnxRuntimeExecutor(program, self._options)
        return SharingExecutor(program, self._shared, self._shared.split(program), self._options)

    def forget(self) -> None:
        """Drop all values in the store."""
        if self._shared is not None:
            self._shared.forget()


def _in_file(array: NDArray[Any], directory: Path) -> NDArray[Any]:
    """Return the array mapped from an unnamed file, which is removed together with the array."""
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            array.tofile(file)
        except OSError as error:
            raise disk_error(error, f"keeping a prompt's cache in {directory}") from error
        return np.memmap(file, array.dtype, "r", shape=array.shape)
