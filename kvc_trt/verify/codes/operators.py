"""Run operators over caches with a format in terms of the vectors that such caches give back.

The isolated runs of all methods (`isolated_runs`) can then judge them like operators over exact caches: moved vectors
must be equal, and a vector with wrong codes reads as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.harness import EngineOperator
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.isolated_runs import CacheCase, Found, PromptCase
from kvc_trt.methods.base.registry import operators
from kvc_trt.models.cache_formats import CacheFormat
from kvc_trt.operators.schema import Operator, Tensor, part_names
from kvc_trt.verify.codes.codebook import Codebook

if TYPE_CHECKING:
    from kvc_trt.methods.base.isolated_runs import RunnableAlone

Array = NDArray[Any]
_EXACT = {"k_new": "keys", "v_new": "values"}
"""Exact inputs that are stored before they are read; the reference sees the vectors that the cache gives back."""


def with_stored_caches(operator: EngineOperator, case: CacheCase, form: CacheFormat) -> tuple[RunnableAlone, CacheCase]:
    """Return an operator over caches in a format that takes the tensors of exact caches, and the matching case.

    The caches of the case, if it has any, hold vectors that codes stand for. Its new tokens are those that the cache
    gives back.
    """
    if form.keys is None or form.values is None:
        return operator, case
    exact = case.exact_keys
    keys, values = (Codebook(vector, exact.shape[-1]) for vector in (form.keys, form.values))
    alone = _OfCodes(operator, operators()[operator.name], form, {"keys": keys, "values": values}, exact.dtype)
    return alone, case.in_caches(keys, values)


def run_store_tokens(operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
    """Run KvcStoreTokens, which stores the first tokens of each row in order of the text, and zeros past its end."""
    results = operator.run(k=case.k, v=case.v, prompt_lengths=case.prompt_lengths)
    slots = results[0].shape[2]
    first = np.where(np.arange(slots) < case.prompt_lengths[:, None, None], np.arange(slots), -1)
    expected = case.kept(np.broadcast_to(first, results[0].shape[:3]))
    return Found(moved=tuple(zip(results, expected, strict=True)))


@dataclass(frozen=True)
class _OfCodes:
    """An operator over a cache in a format, whose inputs and outputs are the vectors that the cache gives back."""

    operator: EngineOperator
    schema: Operator
    """The schema of the operator over exact caches."""
    form: CacheFormat
    books: dict[str, Codebook]
    dtype: Any
    """The type of exact vectors."""

    def run(self, **inputs: Array) -> list[Array]:
        """Return the outputs that the operator would have over exact caches."""
        every = {tensor.name for tensor in self.schema.inputs}
        given = {name: table for name, table in inputs.items() if name not in every}  # numbers by length
        for tensor in self.schema.inputs:
            given |= self._given(tensor, inputs[tensor.name])
        own = self.schema.in_format(self.form)
        results = dict(zip((one.name for one in own.outputs), self.operator.run(**given), strict=True))
        return [self._found(tensor, results) for tensor in self.schema.outputs]

    def _given(self, tensor: Tensor, table: Array) -> dict[str, Array]:
        if tensor.name in _EXACT:
            return {tensor.name: self.books[_EXACT[tensor.name]].exact(table, self.dtype)}
        if tensor.stored is None or not self.schema.stores:
            return {tensor.name: table}
        if tensor.stored == "channels":
            codes = self.books["keys"].codes(table.swapaxes(2, 3))
            return {tensor.name: np.ascontiguousarray(codes.swapaxes(2, 3))}
        names = part_names(tensor, self._vector(tensor))
        return dict(zip(names, self.books[tensor.stored].parts(table), strict=True))

    def _found(self, tensor: Tensor, results: dict[str, Array]) -> Array:
        if tensor.stored is None or not self.schema.stores:
            return results[tensor.name]
        if tensor.stored == "channels":
            read = self.books["keys"].read_codes(results[tensor.name].swapaxes(2, 3))
            return np.ascontiguousarray(read.swapaxes(2, 3))
        parts: Sequence[Array] = [results[name] for name in part_names(tensor, self._vector(tensor))]
        return self.books[tensor.stored].read(parts)

    def _vector(self, tensor: Tensor) -> Any:
        return self.form.values if tensor.stored == "values" else self.form.keys
