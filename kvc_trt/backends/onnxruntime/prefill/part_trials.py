"""Try the parts of a prefill graph on a few tokens: the form of their values, and the time that they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from kvc_trt.backends.onnxruntime.prefill.loaded_parts import ELEMENT_TYPES, LoadedPart
from kvc_trt.backends.onnxruntime.prefill.slice_plan import Measured, Rates, fitted, fitted_to_blocks
from kvc_trt.graph.prefill_parts import LENGTHS, TOKENS
from kvc_trt.operators import PROMPT_BLOCK

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FEW_TOKENS, MANY_TOKENS = 4 * PROMPT_BLOCK, 16 * PROMPT_BLOCK
"""The numbers of keys that trials read. Times at other lengths are calculated from these two."""
TRIAL_SECONDS = 0.04
"""The time for which a trial is repeated; the median counts. An engine's start waits for about a dozen trials."""


@dataclass(frozen=True)
class TokenRows:
    """The form of a value that has rows for the tokens of one prompt."""

    shape: tuple[int, ...]
    """The shape; the size of the token axis has no meaning."""
    axis: int
    dtype: np.dtype[Any]

    def empty(self, tokens: int) -> NDArray[Any]:
        """Return an uninitialised array for this number of tokens."""
        return np.empty((*self.shape[: self.axis], tokens, *self.shape[self.axis + 1 :]), self.dtype)

    def of(self, array: NDArray[Any], first: int, last: int) -> NDArray[Any]:
        """Return a view of some tokens' rows."""
        return array[(slice(None),) * self.axis + (slice(first, last),)]


class Trials:
    """Runs parts on zeros. Parts that share a session are tried once.

    `budget` is the largest number of prompt tokens that a cache that evicts keeps, 0 if none evicts; `longest` the
    engine's number of positions.
    """

    def __init__(self, budget: int, longest: int) -> None:
        self._budget, self._longest = budget, longest
        self.rows = {TOKENS: TokenRows((1, 0), 1, np.dtype(np.int64))}
        """The form of every value with a row per token, by name."""
        self._forms: dict[InferenceSession, list[TokenRows]] = {}
        self._rates: dict[InferenceSession, Rates] = {}

    def learn(self, part: LoadedPart) -> None:
        """Find the forms of the outputs of a part, all of which have a row per token."""
        if part.session not in self._forms:
            shapes = [
                [tuple(value.shape()) for value in part.run(self._zeros(part, 0, tokens))]
                for tokens in (PROMPT_BLOCK, 2 * PROMPT_BLOCK)
            ]
            types = [helper.tensor_dtype_to_np_dtype(ELEMENT_TYPES[one.type]) for one in part.session.get_outputs()]
            self._forms[part.session] = [
                TokenRows(short, _differing_axis(short, long), dtype)
                for short, long, dtype in zip(*shapes, types, strict=True)
            ]
        self.rows.update(zip(part.part.outputs, self._forms[part.session], strict=True))

    def step_rates(self, part: LoadedPart, grain: int) -> Rates:
        """Return the cost of a step, measured on blocks of this number of tokens and of four times as many."""
        if part.session not in self._rates:
            block = 4 * grain
            places = (0, grain), (0, block), (MANY_TOKENS, MANY_TOKENS + block)
            self._rates[part.session] = fitted_to_blocks(*(self._measured(part, *place) for place in places))
        return self._rates[part.session]

    def store_rates(self, part: LoadedPart) -> Rates:
        """Return the cost of storing; none for a part that also reads values stored by earlier ones: it is little."""
        if any(name not in self.rows and name != LENGTHS for name in part.part.inputs):
            return Rates(0.0, 0.0)
        # Beyond the budget, where there is something to evict. A prompt that can never be as long evicts nothing.
        beyond = -(-self._budget // PROMPT_BLOCK) * PROMPT_BLOCK if 0 < self._budget < self._longest else 0
        if part.session not in self._rates:
            near, far = (0, beyond + FEW_TOKENS), (0, 2 * beyond + MANY_TOKENS)
            self._rates[part.session] = fitted(self._measured(part, *near), self._measured(part, *far))
        return self._rates[part.session]

    def seconds(self, part: LoadedPart, first: int, last: int) -> float:
        """Return the median time of a part over the tokens `first` to `last`; its buffers stay."""
        inputs = self._zeros(part, first, last)
        part.run(inputs, shrink=False)  # prepares
        times: list[float] = []
        spent = 0.0
        while spent < TRIAL_SECONDS:
            times.append(_timed(part, inputs))
            spent += times[-1]
        return statistics.median(times)

    def _measured(self, part: LoadedPart, first: int, last: int) -> Measured:
        return first, last, self.seconds(part, first, last)

    def _zeros(self, part: LoadedPart, first: int, last: int) -> Mapping[str, NDArray[Any]]:
        """Return inputs for the tokens `first` to `last`; a part that reads whole prompts gets one of that length."""
        inputs: dict[str, NDArray[Any]] = {}
        for name in part.part.inputs:
            if name == LENGTHS:
                # As many as the engine has positions for; the rest is padding.
                inputs[name] = np.array([min(last, self._longest)], np.int64)
            else:
                inputs[name] = self.rows[name].empty(last if name in part.part.up_to_block else last - first)
                inputs[name].fill(0)
        return inputs


def _timed(part: LoadedPart, inputs: Mapping[str, NDArray[Any]]) -> float:
    started = time.perf_counter()
    part.run(inputs, shrink=False)
    return time.perf_counter() - started


def _differing_axis(short: tuple[int, ...], long: tuple[int, ...]) -> int:
    (axis,) = (axis for axis, (one, other) in enumerate(zip(short, long, strict=True)) if one != other)
    return axis
