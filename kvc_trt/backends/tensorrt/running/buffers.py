"""The block of device memory for an engine's rows, its pinned mirrors on the host, and the copies between them.

The rows of a prefill wait in the last rows of the buffers, which are free: a session never prefills more prompts than
there are free rows, and its active rows come first. So a prefill needs no second set of caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.tensorrt.device import DeviceBlock, PinnedArray, Stream
from kvc_trt.backends.tensorrt.running.memory import (
    ALIGNMENT,
    STAGED,
    BufferSizes,
    aligned,
    lay_out,
    regions,
    turn_offsets,
)
from kvc_trt.errors import InputError
from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    from kvc_trt.engine.program import Program
    from kvc_trt.graph.state import StateTensor


@dataclass(eq=False)
class StagedRows:
    """The rows of one prefill, starting at row `first`."""

    first: int
    count: int
    _lost: set[int] = field(default_factory=set)
    """Rows of the prefill that were overwritten."""

    def take(self, source_row: int, row: int) -> int | None:
        """Return the row to copy to `row` for prefilled row `source_row`; None if it is already there.

        Rows inserted in order after the active rows never overwrite a row that is still needed. ValueError for a row
        that was overwritten.
        """
        if not 0 <= source_row < self.count:
            raise ValueError(f"prefilled row {source_row}: the prefill had {self.count} rows")
        if source_row in self._lost:
            raise ValueError(f"prefilled row {source_row} was overwritten: insert rows in the order of their prompts")
        place = row - self.first
        if place == source_row:
            return None
        self._lost.add(place)
        return self.first + source_row


Array = NDArray[Any]


class Buffers:
    """All device memory for a number of rows, laid out by `memory.regions` and freed as a whole.

    TensorRT needs aligned addresses, and rows inside a buffer are not aligned. So engines are bound only to the start
    of buffers, and rows move by copies.
    """

    def __init__(self, program: Program, sizes: BufferSizes, activations: int, stream: Stream) -> None:
        self.sizes, self.stream = sizes, stream
        self._state = program.state
        self._caches = len(program.capacities)
        wanted = regions(program.model.vocab_size, self._caches, program.state, sizes, activations)
        self._regions, total = lay_out(wanted)
        self._block = DeviceBlock(total)
        self.logits = PinnedArray((sizes.rows, program.model.vocab_size), np.float32)
        """[rows, vocab]: logits of the latest step. Rows may be sampled from it after others are prefilled."""
        self.prompt_logits = PinnedArray((sizes.prefill_rows, program.model.vocab_size), np.float32)
        """[prompts, vocab]: logits of the latest prefill."""
        self.best = PinnedArray((sizes.rows,), np.int32)
        """[rows]: the best token of each row in the latest step."""
        self._step = PinnedArray((self._regions["step"].size // 8,), np.int64)
        self._prompt = PinnedArray((self._regions["prompt"].size // 8,), np.int64)
        self._lengths = PinnedArray((self._regions["lengths"].size // 8,), np.int64)
        self._turn = PinnedArray((self._regions["turn"].size // 8,), np.int64) if sizes.turn_tokens else None
        for tensor in program.state:
            self.fill(tensor, None)
        stream.synchronise()

    def address(self, name: str) -> int:
        """Return the address of a region.

        Regions are a state tensor, STAGED + its name, step, prompt, logits, best, lengths, turn, activations."""
        return self._block.address + self._regions[name].offset

    @property
    def activations(self) -> tuple[int, int]:
        """Return address and size of the memory in which execution contexts work."""
        return self.address("activations"), self._regions["activations"].size

    def step_addresses(self) -> dict[str, int]:
        """Return the addresses of the small inputs of decode, which are aligned and copied in together."""
        return dict(zip(("token", "positions", "cache_lengths"), self._step_parts(self.address("step")), strict=True))

    def write_step(self, tokens: Array, positions: Array, cache_lengths: Array) -> None:
        """Put a step's inputs into pinned memory, at the same offsets."""
        for offset, values in zip(self._step_parts(0), (tokens, positions, cache_lengths), strict=True):
            self._step.array[offset // 8 : offset // 8 + values.size] = np.ravel(values)

    def queue_step_in(self) -> None:
        """Copy the step's inputs to the device."""
        self.stream.copy_in(self.address("step"), self._step.address, self._step.size)

    def queue_logits_out(self, destination: PinnedArray, rows: int) -> None:
        """Copy a run's logits to the host, into `logits` or `prompt_logits`."""
        size = rows * int(destination.array.shape[1]) * destination.array.itemsize
        self.stream.copy_out(destination.address, self.address("logits"), size)

    def queue_best_out(self, rows: int) -> None:
        """Copy a step's best tokens to the host."""
        self.stream.copy_out(self.best.address, self.address("best"), rows * self.best.array.itemsize)

    def queue_prompts_in(self, input_ids: Array, prompt_lengths: Array) -> dict[str, int]:
        """Copy prompts [B,S] and their lengths [B] to the device; returns the addresses of both inputs."""
        lengths_at = aligned(input_ids.size * 8)
        self._prompt.array[: input_ids.size] = input_ids.ravel()
        self._prompt.array[lengths_at // 8 : lengths_at // 8 + prompt_lengths.size] = prompt_lengths
        base = self.address("prompt")
        self.stream.copy_in(base, self._prompt.address, lengths_at + prompt_lengths.size * 8)
        return {"input_ids": base, "prompt_lengths": base + lengths_at}

    def queue_turn_in(self, tokens: Array, position: int, cache_lengths: Array) -> dict[str, int]:
        """Copy a row's new tokens [M] and the cache lengths before them [caches] to the device; returns the
        addresses."""
        assert self._turn is not None, "an engine without turns"
        *places, _ = turn_offsets(self.sizes.turn_tokens, self._caches)
        parts = tokens, np.array([len(tokens)]), np.array([position]), cache_lengths
        for offset, part in zip(places, parts, strict=True):
            self._turn.array[offset // 8 : offset // 8 + part.size] = part
        base = self.address("turn")
        self.stream.copy_in(base, self._turn.address, self._turn.size)
        names = "input_ids", "lengths", "positions", "cache_lengths"
        return {name: base + offset for name, offset in zip(names, places, strict=True)}

    def queue_lengths_out(self, rows: int) -> None:
        """Copy the cache lengths that a prefill gives to the host."""
        self.stream.copy_out(self._lengths.address, self.address("lengths"), self._caches * rows * 8)

    def lengths(self, rows: int) -> NDArray[np.int64]:
        """Return the lengths [caches, rows] that `queue_lengths_out` copied."""
        found: NDArray[np.int64] = self._lengths.array[: self._caches * rows].reshape(self._caches, rows)
        return found

    def queue_unstage(self, rows: int, first: int) -> None:
        """Copy the first `rows` staged rows to the rows from `first` on."""
        for tensor in self._state:
            size = tensor.bytes_per_row()
            self.stream.copy(self.address(tensor.name) + first * size, self.address(STAGED + tensor.name), rows * size)

    def copy_row(self, source: int, row: int) -> None:
        """Queue the copy of one row of every state tensor."""
        for tensor in self._state:
            base, size = self.address(tensor.name), tensor.bytes_per_row()
            self.stream.copy(base + row * size, base + source * size, size)

    def take_row(self, row: int) -> dict[str, int]:
        """Return where a row's state is, by name, each tensor at an address that an engine takes.

        A row that is not aligned is copied to the rows of a prefill, which must be free, until `give_back`.
        """
        return {tensor.name: self._row_of(tensor, row) for tensor in self._state}

    def give_back(self, row: int) -> None:
        """Queue copies back to the row of the tensors that `take_row` copied."""
        for tensor in self._state:
            if not self._is_aligned(tensor):
                size = tensor.bytes_per_row()
                self.stream.copy(self.address(tensor.name) + row * size, self.address(STAGED + tensor.name), size)

    def _row_of(self, tensor: StateTensor, row: int) -> int:
        size = tensor.bytes_per_row()
        address = self.address(tensor.name) + row * size
        if self._is_aligned(tensor):
            return address
        copy = self.address(STAGED + tensor.name)
        self.stream.copy(copy, address, size)
        return copy

    def _is_aligned(self, tensor: StateTensor) -> bool:
        return tensor.bytes_per_row() % ALIGNMENT == 0

    def fill(self, tensor: StateTensor, row: Array | None) -> None:
        """Give every row of a state tensor the contents of `row`, or with None the tensor's fill value."""
        base, size = self.address(tensor.name), tensor.bytes_per_row()
        if row is None and tensor.fill == 0:
            self.stream.zero(base, self.sizes.rows * size)
            return
        if row is None:
            row = np.full(tensor.shape, tensor.fill, numpy_dtype(tensor.dtype))
        contiguous = np.ascontiguousarray(row, numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        self.stream.copy_in(base, contiguous.ctypes.data, size)
        self.stream.synchronise()  # before the array is freed
        for index in range(1, self.sizes.rows):
            self.stream.copy(base + index * size, base, size)

    def read(self, tensor: StateTensor) -> Array:
        """Return a copy of a state tensor, [rows, ...]."""
        found = np.empty((self.sizes.rows, *tensor.shape), numpy_dtype(tensor.dtype))
        self.stream.copy_out(found.ctypes.data, self.address(tensor.name), found.nbytes)
        self.stream.synchronise()
        return found

    def read_row(self, tensor: StateTensor, row: int) -> Array:
        """Return a copy of one row of a state tensor."""
        found = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        self.stream.copy_out(found.ctypes.data, self.address(tensor.name) + row * found.nbytes, found.nbytes)
        self.stream.synchronise()
        return found

    def write_row(self, tensor: StateTensor, row: int, array: Array) -> None:
        """Write one row of a state tensor."""
        contiguous = np.ascontiguousarray(array, numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        address = self.address(tensor.name) + row * contiguous.nbytes
        self.stream.copy_in(address, contiguous.ctypes.data, contiguous.nbytes)
        self.stream.synchronise()  # before the array is freed

    def check_rows(self, rows: int) -> None:
        """Raise InputError for more rows than were allocated."""
        if not 1 <= rows <= self.sizes.rows:
            raise InputError(
                f"{rows} rows at once: expected 1 to {self.sizes.rows}, for which memory was planned",
                hint="open the session with a larger max_batch_size",
            )

    def free(self) -> None:
        """Free all buffers; nothing may be running on them."""
        pinned = (self.logits, self.prompt_logits, self.best, self._step, self._prompt, self._lengths)
        for part in (self._block, *pinned, *(() if self._turn is None else (self._turn,))):
            part.free()

    def _step_parts(self, base: int) -> Sequence[int]:
        one = aligned(self.sizes.rows * 8)
        return base, base + one, base + 2 * one
