"""A prefill of one prompt that runs slice by slice; its results are those of the whole graph, bit for bit.

A slice is as many layers as fit into the limit, or a part of one layer: blocks of its tokens. At most two layers' keys
and values live at a time, and everything else that a layer needs is there for one block only: a prompt takes no more
memory than in one piece.

ONNX Runtime divides a matrix product among its threads by rows or by columns, and adds up the columns of a narrow part
in another order. A block of at least PROMPT_BLOCK tokens per thread is divided so that it has the whole product's sums.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.onnxruntime.prefill.loaded_parts import LoadedPart, PartLoader, Value
from kvc_trt.backends.onnxruntime.prefill.part_trials import TokenRows, Trials
from kvc_trt.backends.onnxruntime.prefill.slice_plan import blocks, grouped
from kvc_trt.graph.prefill_parts import LENGTHS, TOKENS, PrefillParts
from kvc_trt.operators import PROMPT_BLOCK

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
Key: TypeAlias = str | tuple[str, int]
"""A value of the whole prompt, or of the block that begins with this token."""


@dataclass(frozen=True)
class PrefillPiece:
    """The unit that runs at once: a part of the graph, or one block of tokens of a step."""

    loaded: LoadedPart
    seconds: float
    """The time that it is expected to take."""
    block: tuple[int, int] | None = None
    """First token and end; None for a part that reads the whole prompt."""


class SlicedPrefill:
    """The parts of one engine's prefill graph, loaded, and their cost on this machine (`trials`)."""

    def __init__(
        self, parts: PrefillParts, loader: PartLoader, trials: Trials, threads: int, keep: Collection[str] = ()
    ) -> None:
        self._keep = tuple(keep)
        self._grain = PROMPT_BLOCK * threads
        self._positions = loader.load(parts.positions) if parts.positions.nodes else None
        if self._positions is not None:
            trials.learn(self._positions)
        self._steps: list[LoadedPart] = []
        self._stores: list[LoadedPart | None] = []
        for step, store in zip(parts.steps, parts.stores, strict=True):
            self._steps.append(loader.load(step))
            trials.learn(self._steps[-1])
            self._stores.append(loader.load(store) if store.nodes else None)
        self._head = loader.load(parts.head)
        self._rows: Mapping[str, TokenRows] = trials.rows
        self._whole = _read_whole(parts) | frozenset(keep)
        self._step_rates = [trials.step_rates(step, self._grain) for step in self._steps]
        self._store_rates = [None if store is None else trials.store_rates(store) for store in self._stores]
        self._head_seconds = trials.seconds(self._head, 0, PROMPT_BLOCK)
        self._free_buffers()

    def slices(self, tokens: int, limit: float) -> list[list[PrefillPiece]]:
        """Return the slices of a prompt of `tokens` tokens, padding included, that take at most `limit` seconds each.

        A single piece that takes longer is a slice of its own.
        """
        pieces = list(self._pieces(tokens, limit))
        return [[pieces[i] for i in group] for group in grouped((piece.seconds for piece in pieces), limit)]

    def run(
        self, slices: Sequence[Sequence[PrefillPiece]], prompt: Arrays, results: Arrays
    ) -> Generator[float, None, Arrays]:
        """Run one slice per `next`, write the graph's outputs to `results`, and yield the share of the slices that ran.

        `prompt` holds `input_ids` [1,S] and `prompt_lengths` [1]. Returns the values that the parts keep.
        """
        values = _Values(self._rows, self._whole, results, prompt)
        pieces = [piece for group in slices for piece in group]
        unread = self._unread(pieces)
        try:
            for number, group in enumerate(slices):
                if number:
                    yield number / len(slices)
                for piece in group:
                    outputs = values.outputs(piece)
                    found = piece.loaded.run(values.inputs(piece), outputs, shrink=False)
                    values.store(piece, outputs, dict(zip(piece.loaded.part.outputs, found, strict=True)))
                    values.drop(unread.get(id(piece), ()))
        finally:
            self._free_buffers()
        return {name: values.get(name) for name in self._keep}

    def _free_buffers(self) -> None:
        # The parts share them: any of them frees them. These two read nothing but tokens.
        (self._positions or self._steps[0]).run({TOKENS: np.zeros((1, 1), np.int64)}, shrink=True)

    def _unread(self, pieces: Iterable[PrefillPiece]) -> dict[int, list[Key]]:
        """Return for each piece, by identity, the values that nothing reads after it."""
        last = {key: id(piece) for piece in pieces for key in _reads(piece, self._whole) if key not in self._keep}
        found: dict[int, list[Key]] = {}
        for key, piece in last.items():
            found.setdefault(piece, []).append(key)
        return found

    def _pieces(self, tokens: int, limit: float) -> Iterator[PrefillPiece]:
        # All layers have the same blocks: some values of one block are read in the next layer's.
        slowest = max(self._step_rates, key=lambda rates: rates.seconds(0, tokens))
        cuts = blocks(slowest, tokens, self._grain, limit)
        if self._positions is not None:
            yield PrefillPiece(self._positions, 0.0)
        for step, rates, store, store_rates in zip(
            self._steps, self._step_rates, self._stores, self._store_rates, strict=True
        ):
            # The last block reads most keys and comes first, so that the others find its memory.
            for block in reversed(cuts):
                yield PrefillPiece(step, rates.seconds(*block), block)
            if store is not None and store_rates is not None:
                yield PrefillPiece(store, store_rates.seconds(0, tokens))
        yield PrefillPiece(self._head, self._head_seconds)


class _Values:
    """The values of one prompt while its parts run."""

    def __init__(self, rows: Mapping[str, TokenRows], whole: frozenset[str], results: Arrays, prompt: Arrays) -> None:
        self._rows, self._whole, self._results = rows, whole, results
        self._tokens = prompt[TOKENS].shape[1]
        self._values: dict[Key, Value] = dict(prompt.items())

    def inputs(self, piece: PrefillPiece) -> dict[str, Value]:
        """Return the inputs of a piece by name."""
        part = piece.loaded.part
        found = {name: self._values[key] for name, key in zip(part.inputs, _reads(piece, self._whole), strict=True)}
        if piece.block is not None:
            first, last = piece.block
            for name in self._whole & found.keys():
                start = 0 if name in part.up_to_block else first
                found[name] = np.ascontiguousarray(self._rows[name].of(found[name], start, last))
        return found

    def outputs(self, piece: PrefillPiece) -> dict[str, NDArray[Any]]:
        """Return arrays for the outputs of a piece; ONNX Runtime makes those of values whose form is not known."""
        names = piece.loaded.part.outputs
        if piece.block is None:
            made = {name: self._rows[name].empty(self._tokens) for name in names if name in self._rows}
            return made | {name: self._results[name] for name in names if name in self._results}
        return {name: self._block(name, *piece.block) for name in names}

    def store(self, piece: PrefillPiece, outputs: Arrays, found: Mapping[str, Value]) -> None:
        """Keep the outputs of a piece."""
        for name, value in found.items():
            if piece.block is None:
                self._values[name] = outputs.get(name, value)
            elif name not in self._whole:
                self._values[name, piece.block[0]] = outputs[name]
            elif not np.shares_memory(outputs[name], array := self._array(name)):
                self._rows[name].of(array, *piece.block)[:] = outputs[name]

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget values that nothing reads any more."""
        for key in keys:
            del self._values[key]

    def get(self, name: str) -> NDArray[Any]:
        """Return a value of the whole prompt."""
        value = self._values[name]
        return value if isinstance(value, np.ndarray) else value.numpy()

    def _block(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Return an array for a block's rows: in that of the whole prompt if they lie side by side there."""
        if name in self._whole:
            place = self._rows[name].of(self._array(name), first, last)
            if place.flags.c_contiguous:
                return place
        return self._rows[name].empty(last - first)

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._values:
            self._values[name] = self._rows[name].empty(self._tokens)
        return self.get(name)


def _read_whole(parts: PrefillParts) -> frozenset[str]:
    """Return the values of which some part reads more than one block of tokens."""
    found = {TOKENS, LENGTHS, *parts.positions.outputs, *parts.head.inputs}
    for step, store in zip(parts.steps, parts.stores, strict=True):
        found |= {*step.up_to_block, *store.inputs}
    return frozenset(found)


def _reads(piece: PrefillPiece, whole: Collection[str]) -> list[Key]:
    """Return the values that a piece reads, in the order of its part's inputs."""
    first = None if piece.block is None else piece.block[0]
    return [name if first is None or name in whole else (name, first) for name in piece.loaded.part.inputs]
