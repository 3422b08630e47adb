"""Run an engine's graphs with ONNX Runtime on the CPU; every decode step updates one buffer per tensor in place.

ONNX Runtime does not copy a cache if the scatter node's input and output are the same memory. So the same pointer is
bound as both, once per number of rows, and the small inputs are written to the memory that is bound.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.onnxruntime.binding import bind_input, bind_output, return_freed_memory, shrinking
from kvc_trt.backends.onnxruntime.draft_pass import DraftPass
from kvc_trt.backends.onnxruntime.engine_sessions import EngineSessions
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.runtime.executor import CheckedDraft, ExecutorBase, Extended, Prefilled
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.graph.state import StateTensor


class OnnxRuntimeExecutor(EngineSessions, ExecutorBase):
    """The `Executor` of one engine, or of a `Program` derived from one, over one buffer per state tensor."""

    _buffers: dict[str, NDArray[Any]]
    _bound_rows = 0

    @cached_property
    def _drafts(self) -> DraftPass:
        return DraftPass(self.draft_session, self.program, self._buffers, self._expose_draft)

    def load(self) -> None:
        """Load the graphs of prompts and steps now, so that the first prompt does not wait for them."""
        self._load_prefill()
        assert self.decode_session is not None

    @property
    def buffers(self) -> dict[str, NDArray[Any]]:
        """The state by tensor name, [max_batch_size, ...]; written in place by `decode`."""
        return self._buffers

    def allocate(self, max_batch_size: int) -> None:
        """Allocate the state buffers and the small inputs and outputs of a step."""
        try:
            self._buffers = state_buffers(self.program.state, max_batch_size)
            self._tokens = np.zeros(max_batch_size, np.int64)
            self._positions = np.zeros(max_batch_size, np.int64)
            self._lengths = np.zeros(len(self._limits.capacities) * max_batch_size, np.int64)
            self._logits = np.zeros((max_batch_size, self._limits.vocab_size), np.float32)
        except MemoryError as error:
            needed = max_batch_size * sum(tensor.bytes_per_row() for tensor in self.program.state)
            raise UnsupportedEnvironment(
                f"the caches of {max_batch_size} rows need {readable_size(needed)}, more than this machine gives",
                hint="take a smaller batch, or build the engine with a smaller token budget or length",
            ) from error
        self._bound_rows = 0
        self.__dict__.pop("_drafts", None)  # bound to the former buffers

    def fill_rows(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Fill every row of the named state tensors with these contents, each of one row's shape."""
        for name, row in rows.items():
            self._buffers[name][:] = row

    def state_bytes(self) -> int:
        """Return the size of the allocated state buffers in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def prefill(self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> Prefilled:
        """Run the prompts; the rows' state is a new array [B, ...] per state tensor."""
        prefilled = self._empty(len(prompt_lengths))
        self._run_prefill(_prompt(input_ids, prompt_lengths), _outputs(prefilled))
        return_freed_memory()
        return prefilled

    def prepare_slices(self) -> None:
        """Load the parts of the prefill graph now, and measure their times."""
        assert not self.cuts_prefill or self._sliced is not None

    def prefill_in_slices(
        self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64], limit: float
    ) -> Generator[float, None, Prefilled]:
        """Run one slice of the prefill of a prompt [1,S] per `next`; each takes at most `limit` seconds if it can.

        The returned result equals that of `prefill` bit for bit. Closing the generator abandons the prefill.
        """
        if len(prompt_lengths) != 1:
            raise ValueError(f"a prefill in slices is that of one prompt, found {len(prompt_lengths)}")
        slices = self._sliced.slices(input_ids.shape[1], limit) if self.cuts_prefill else []
        if len(slices) < 2:  # the whole graph makes fewer calls
            return self.prefill(input_ids, prompt_lengths)
        prefilled = self._empty(1)
        try:
            prompt = _prompt(input_ids, prompt_lengths)
            self._exposed.update((yield from self._sliced.run(slices, prompt, _outputs(prefilled))))
        finally:
            return_freed_memory()
        return prefilled

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy one prefilled row into every buffer."""
        for name, buffer in self._buffers.items():
            buffer[row] = prefilled.state[name][source_row]

    def move(self, source_row: int, row: int) -> None:
        """Copy one row of every buffer over another."""
        for buffer in self._buffers.values():
            buffer[row] = buffer[source_row]

    def read_row(self, row: int) -> dict[str, NDArray[Any]]:
        """Return one row of every state tensor, by name; its memory is that of the buffers."""
        return {name: buffer[row] for name, buffer in self._buffers.items()}

    def write_row(self, row: int, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Write one row of every state tensor, given by name."""
        for name, array in tensors:
            self._buffers[name][row] = array

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run one step of the first len(tokens) rows in place; the logits are valid until the next call."""
        rows = len(tokens)
        if rows != self._bound_rows:
            self._bind(rows)
        self._tokens[:rows] = tokens
        self._positions[:rows] = positions
        self._lengths[: cache_lengths.size] = cache_lengths.ravel()
        self._run(self.decode_session, self.binding, self._expose_decode)
        self._runs += 1
        return self._logits[:rows]

    @override
    def load_turns(self) -> None:
        """Load the extend graph."""
        assert self.extend_session is not None

    def extend(
        self, first_row: int, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], positions: NDArray[np.int64],
        cache_lengths: NDArray[np.int64],
    ) -> Extended:  # fmt: skip
        """Let the rows from `first_row` on take a turn; if it compacts, it rewrites their part of the buffers."""
        rows, session = len(lengths), self.extend_session
        block = (input_ids.shape[1],) if self._limits.all_logits else ()
        logits = np.empty((rows, *block, self._limits.vocab_size), np.float32)
        after = np.empty(cache_lengths.shape, np.int64)
        binding = session.io_binding()
        given = {"input_ids": input_ids, "lengths": lengths, "positions": positions, "cache_lengths": cache_lengths}
        arrays = {name: np.ascontiguousarray(array, np.int64) for name, array in given.items()}
        for name, array in arrays.items():
            bind_input(binding, name, array)
        bind_output(binding, "logits", logits)
        bind_output(binding, "cache_lengths_out", after)
        for tensor in self.program.state:
            part = self._buffers[tensor.name][first_row : first_row + rows]
            bind_input(binding, tensor.name, part)
            bind_output(binding, tensor.aliased_output, part)
        for name in self._expose_extend:
            binding.bind_output(name, "cpu")
        self._run(session, binding, self._expose_extend, shrinking())
        return_freed_memory()
        return Extended(logits[np.arange(rows), lengths - 1], after, logits) if block else Extended(logits, after)

    @override
    def load_drafts(self) -> None:
        """Load the draft graph."""
        assert self.draft_session is not None

    def check_draft(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> CheckedDraft:
        """Run a pass over `tokens` [1 + draft_tokens, rows] of the first rows in place."""
        checked = self._drafts.run(tokens, positions, cache_lengths)
        self._exposed.update(self._drafts.exposed)
        return checked

    def take_back(self, row: int, undo: Any, cache_lengths: NDArray[np.int64], kept: int) -> None:
        """Undo the steps of the latest pass of a row except the first `kept`."""
        self._drafts.take_back(row, undo, cache_lengths, kept)

    def _empty(self, rows: int) -> Prefilled:
        """Return arrays for the result of a prefill."""
        return Prefilled(
            np.empty((rows, self._limits.vocab_size), np.float32),
            np.empty((len(self._limits.capacities), rows), np.int64),
            {tensor.name: np.empty((rows, *tensor.shape), tensor.dtype) for tensor in self.program.state},
        )

    def _load_prefill(self) -> None:
        assert self.prefill_session is not None

    def _run_prefill(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
        """Run the prefill graph once and write the `outputs`; all arrays are contiguous."""
        binding = self.prefill_session.io_binding()
        for name, array in inputs.items():
            bind_input(binding, name, array)
        for name, array in outputs.items():
            bind_output(binding, name, array)
        for name in self._expose_prefill:
            binding.bind_output(name, "cpu")
        self._run(self.prefill_session, binding, self._expose_prefill, shrinking())

    def _bind(self, rows: int) -> None:
        self.binding = self.decode_session.io_binding()
        lengths = self._lengths[: len(self._limits.capacities) * rows].reshape(-1, rows)
        bind_input(self.binding, "token", self._tokens[:rows])
        bind_input(self.binding, "positions", self._positions[:rows])
        bind_input(self.binding, "cache_lengths", lengths)
        bind_output(self.binding, "logits", self._logits[:rows])
        for tensor in (tensor for tensor in self.program.state if tensor.in_step):
            active = self._buffers[tensor.name][:rows]
            bind_input(self.binding, tensor.name, active)
            bind_output(self.binding, tensor.aliased_output, active)
        for name in self._expose_decode:
            self.binding.bind_output(name, "cpu")
        self._bound_rows = rows


def _prompt(input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the inputs of the prefill graph."""
    return {
        "input_ids": np.ascontiguousarray(input_ids, np.int64),
        "prompt_lengths": np.ascontiguousarray(prompt_lengths, np.int64),
    }


def _outputs(prefilled: Prefilled) -> dict[str, NDArray[Any]]:
    """Return the outputs of the prefill graph by name."""
    return {"logits": prefilled.logits, "cache_lengths": prefilled.cache_lengths, **prefilled.state}


HUGE_PAGE = 2 << 20
"""Bytes of a page that the system maps at once where it is told to, as NumPy does for arrays of 4 MiB and more."""
_LINE = 64


def state_buffers(tensors: Sequence[StateTensor], rows: int) -> dict[str, NDArray[Any]]:
    """Return the state buffers [rows, ...] by name, filled with their tensors' fill values.

    Tensors whose rows take a huge page or more lie one after another, so that all but the ends of all are huge pages:
    of an array alone up to two pages are none, half of a cache of 4 MiB, and how many differed from process to process.
    """
    large = {one.name for one in tensors if one.fill == 0 and one.bytes_per_row() >= HUGE_PAGE}
    sizes = {one.name: -(-rows * one.bytes_per_row() // _LINE) * _LINE for one in tensors}
    memory = np.zeros(HUGE_PAGE + sum(sizes[name] for name in large), np.uint8)
    found, place = {}, -memory.ctypes.data % HUGE_PAGE
    for tensor in tensors:
        if tensor.name in large:
            own = memory[place : place + rows * tensor.bytes_per_row()]
            found[tensor.name] = own.view(tensor.dtype).reshape(rows, *tensor.shape)
            place += sizes[tensor.name]
        else:
            found[tensor.name] = filled(tensor, rows)
    return found


def filled(tensor: StateTensor, rows: int) -> NDArray[Any]:
    """Return a state buffer [rows, ...] that holds the tensor's fill value."""
    shape = (rows, *tensor.shape)
    # The system provides zeros lazily: rows that are never used cost no memory.
    return np.zeros(shape, tensor.dtype) if tensor.fill == 0 else np.full(shape, tensor.fill, tensor.dtype)
