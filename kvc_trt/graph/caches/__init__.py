"""How each kind of cache is written into the two graphs: one module per decode selection.

A module says what prefill leaves in the cache, which operator a step calls, and the bodies of its operators; the
tensors themselves are described in `kvc_trt.graph.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from onnx import FunctionProto

from kvc_trt.graph.caches import dense, heavy_hitters, hybrid, quest, recent, sparq
from kvc_trt.graph.caches.prompt import PromptLayer
from kvc_trt.graph.caches.step import StepLayer
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.operators.emitter import Value


class CacheKind(Protocol):
    """What a module of this package offers."""

    def prefill(self, layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
        """Write the cache's state tensors after a prompt, and its `lengths.NAME` [B]."""

    def decode(self, layers: Layers, step: StepLayer, site: CacheSite) -> Value:
        """Append one token, attend: [B,heads,D]; write the state tensors' aliased outputs."""

    def bodies(self, layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
        """The operators that `prefill` and `decode` may call, by name."""


KINDS: Mapping[str, CacheKind] = {
    "dense": dense,
    "hybrid": hybrid,
    "quest": quest,
    "sparq": sparq,
    "recent": recent,
    "heavy-hitters": heavy_hitters,
}
"""By `PolicyParameters.decode_selection`."""
