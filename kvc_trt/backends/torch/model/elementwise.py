"""The operations between a layer's products: norms, rotation, gating. Pure functions, eager or compiled.

Eager, each is several GPU kernels, which at a small batch cost as much as the products; compiled by `torch.compile`,
each is one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.cache import cache_root

log = logging.getLogger(__name__)
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def normed(x: Tensor, weight: Tensor | None, epsilon: float, bias: Tensor | None = None, kind: str = "rms") -> Tensor:
    """Apply the root-mean-square norm, or LayerNorm (`layer`), to x [N,width], computed in float32.

    Squares of half types overflow.
    """
    if kind == "rms":
        return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


def added_and_normed(
    hidden: Tensor, update: Tensor, weight: Tensor | None, epsilon: float, bias: Tensor | None = None, kind: str = "rms"
) -> tuple[Tensor, Tensor]:
    """Return the residual stream after an update [N,hidden], and its norm, which the next product reads."""
    hidden = hidden + update
    return hidden, normed(hidden, weight, epsilon, bias, kind)


def rotated_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: tuple[int, int],
    epsilon: float, q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split the product [N,(H+2G)*D] of the joined matrix into contiguous queries [N,H,D], keys, values [N,G,D].

    Queries and keys are normed if the model norms them: each head (weights [D]), all of them together ([heads*D]), or
    each with weights of its own ([heads,D]). Queries are multiplied by `q_scale` [D], and both are rotated in float32:
    cos, sin [N,D/2]; heads (H, G).
    """
    size = 2 * cos.shape[-1]
    query, keys, values = torch.split(joined.view(len(joined), -1, size), [heads[0], heads[1], heads[1]], dim=1)
    if q_norm is not None and k_norm is not None:
        query, keys = _normed_heads(query, q_norm, epsilon), _normed_heads(keys, k_norm, epsilon)
    if q_scale is not None:
        query = query * q_scale
    return _rotated(query, cos, sin), _rotated(keys, cos, sin), values.contiguous()


def _normed_heads(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply the norm to each head of x [N,heads,D], or to all of them if the weights are as many.

    With weights [heads,D] it is LayerNorm, each head with its own.
    """
    if weight.dim() == 2:
        return functional.layer_norm(x, (x.shape[-1],), None, None, epsilon) * weight
    if len(weight) == x.shape[-1]:
        return normed(x, weight, epsilon)
    return normed(x.flatten(1), weight, epsilon).view(x.shape)


def activated(x: Tensor, activation: str) -> Tensor:
    """Apply the activation of `FeedForward.activation`."""
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu-tanh":
        return functional.gelu(x, approximate="tanh")
    return functional.relu(x) if activation == "relu" else functional.silu(x)


def gated(joined: Tensor, activation: str = "silu") -> Tensor:
    """Apply SwiGLU (arXiv 2002.05202) or one of its kind: [N,2*inner], gate before up, to [N,inner]."""
    gate, up = joined.chunk(2, dim=-1)
    return activated(gate, activation) * up


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding (arXiv 2104.09864); the two halves of a head [N,heads,D] form the pairs."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


@dataclass(frozen=True)
class Elementwise:
    """The functions above, eager or compiled."""

    normed: Callable[..., Tensor]
    added_and_normed: Callable[..., tuple[Tensor, Tensor]]
    rotated_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gated: Callable[..., Tensor]
    activated: Callable[..., Tensor]


class Compiled:
    """A compiled pure function; if compiling fails, it stays eager and logs the reason.

    A user's machine may lack Triton, or the C compiler that Triton calls.
    """

    def __init__(self, function: Callable[..., Any], compile: Callable[..., Callable[..., Any]]) -> None:
        self._function = function
        self._run = compile(function)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; a compiler failure changes the speed, never the result."""
        try:
            return self._run(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self._run is self._function:
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            log.warning("torch.compile failed for %s, which runs as written, slower: %s", self._name, reason)
            self._run = self._function
            return self._function(*arguments)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", "a function")


AS_WRITTEN = Elementwise(normed, added_and_normed, rotated_heads, gated, activated)


@cache
def compiled() -> Elementwise:
    """Return the compiled functions; each is compiled on its first call, once per process.

    What the compiler makes is kept in the user's cache (`TORCHINDUCTOR_CACHE_DIR` if that is set), for later processes;
    a user who can have none gets the compiler's own temporary folder.
    """
    if COMPILER_CACHE not in os.environ:
        with suppress(UnsupportedEnvironment):
            os.environ[COMPILER_CACHE] = str(cache_root() / "compiled")
    functions: list[Any] = [
        Compiled(function, torch.compile) for function in (normed, added_and_normed, rotated_heads, gated, activated)
    ]
    return Elementwise(*functions)
