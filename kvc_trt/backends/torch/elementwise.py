"""What happens between a layer's products: norms, rotation, gating. Pure functions, as written or compiled.

As written each is a handful of kernels on a GPU, which at a small batch would cost as much as the products between
them; compiled (by `torch.compile`) each is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm of x [N,width]; in float32 inside, whatever the type: squares of half types overflow."""
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def added_and_normed(hidden: Tensor, update: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The residual stream after an update [N,hidden], and its norm, which the next product reads."""
    hidden = hidden + update
    return hidden, normed(hidden, weight, epsilon)


def rotated_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: tuple[int, int],
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """joined [N,(H+2G)*D], as the joined matrix makes it, into queries [N,H,D], keys and values [N,G,D], contiguous.

    Queries and keys are normed where the model norms heads, then rotated in float32: cos, sin [N,D/2]; heads (H, G).
    """
    size = 2 * cos.shape[-1]
    query, keys, values = torch.split(joined.view(len(joined), -1, size), [heads[0], heads[1], heads[1]], dim=1)
    if q_norm is not None and k_norm is not None:
        query, keys = normed(query, q_norm, epsilon), normed(keys, k_norm, epsilon)
    return _rotated(query, cos, sin), _rotated(keys, cos, sin), values.contiguous()


def gated(joined: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202): [N,2*inner], gate before up, to [N,inner]."""
    gate, up = joined.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864), the two halves of a head [N,heads,D] forming the pairs."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


@dataclass(frozen=True)
class Elementwise:
    """The functions above, in the form that a device wants."""

    normed: Callable[..., Tensor]
    added_and_normed: Callable[..., tuple[Tensor, Tensor]]
    rotated_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gated: Callable[..., Tensor]


class Compiled:
    """A pure function through `compile`; as written, for good, once that fails, with the reason in the log.

    What can be missing on a user's machine: Triton, or the C compiler that Triton calls.
    """

    def __init__(self, function: Callable[..., Any], compile: Callable[..., Callable[..., Any]]) -> None:
        self._function = function
        self._run = compile(function)

    def __call__(self, *arguments: Any) -> Any:
        """Call it; a failure of the compiler changes the speed, never the result."""
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


AS_WRITTEN = Elementwise(normed, added_and_normed, rotated_heads, gated)


@cache
def compiled() -> Elementwise:
    """Each function as one kernel or two; compiled when it is first called, once per process."""
    functions: list[Any] = [
        Compiled(function, torch.compile) for function in (normed, added_and_normed, rotated_heads, gated)
    ]
    return Elementwise(*functions)
