"""Executors that load each graph once: a session keeps nothing of a run, and loading takes longer than most runs."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property, lru_cache
from typing import Any

from onnxruntime import InferenceSession

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.prefill.sliced_prefill import SlicedPrefill
from kvc_trt.engine.program import Graph, Program


class SharingExecutor(OnnxRuntimeExecutor):
    """An executor with buffers of its own, over the sessions that others of its program have loaded before it.

    For tests of what rows hold. One of how a graph is loaded takes `OnnxRuntimeExecutor` itself.
    """

    def _load(self, name: str, graph: Graph, expose: list[str], **options: Any) -> InferenceSession:
        key = (name, graph, *expose, self._options.threads, self._native, *options.items())
        loaded = _loaded_of(self.program)
        if key not in loaded:
            # The weights stay mapped as long as a session reads them.
            loaded[key] = super()._load(name, graph, expose, **options), self._weights
        return loaded[key][0]

    @cached_property
    def _sliced(self) -> SlicedPrefill:
        key = ("slices", *self._expose_prefill, self._options.threads, self._native)
        loaded = _loaded_of(self.program)
        if key not in loaded:
            loaded[key] = super()._sliced, self._weights
        return loaded[key][0]


@lru_cache(maxsize=24)
def _loaded_of(program: Program) -> dict[Hashable, tuple[Any, object]]:
    """Return the objects that a program's executors have loaded, by their arguments, with the weights they read."""
    return {}
