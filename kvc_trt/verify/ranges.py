"""Check that a model's activations fit the range of the type in which an engine computes, and name those that do not.

Even if the weights fit a type, the activations may not: float16 ends at 65,504, and models made in bfloat16 exceed
that. The engine's logits are then NaN, or look plausible, because infinity may vanish in a later normalisation. The
reference computes the same tensors in float32 and measures them here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_LARGEST = {"float16": torch.finfo(torch.float16).max, "bfloat16": torch.finfo(torch.bfloat16).max}


@dataclass
class Ranges:
    """The activations of a run, measured against the range of one type (`float32`, `float16` or `bfloat16`)."""

    activations: str
    measured: int = 0
    """The number of tensors measured; a tensor counts once for each prompt or step."""
    beyond: dict[str, str] = field(default_factory=dict)
    """Name of a tensor -> a description of its first value outside the range, in the order of computation."""

    @property
    def largest(self) -> float:
        """The largest finite number of the type."""
        return _LARGEST.get(self.activations, torch.finfo(torch.float32).max)

    @property
    def first(self) -> str:
        """The name of the first tensor that left the range, with its value; empty if none did."""
        return next((f"the first is {name}: {found}" for name, found in self.beyond.items()), "")

    def measure(self, name: str, values: Tensor) -> None:
        """Compare the values of tensor `name` with the range."""
        self.measured += 1
        if not bool(values.abs().max() <= self.largest):
            self.beyond.setdefault(name, self._describe(values))

    def measure_stream(self, name: str, values: Tensor) -> None:
        """Compare a residual stream [N,hidden] with the range, and its mean square with float32's.

        Every norm computes that mean square in float32; if it overflows, the norm returns zeros.
        """
        self.measure(name, values)
        square = values.to(torch.float32).pow(2).mean(dim=-1)
        if not bool(square.max() <= torch.finfo(torch.float32).max):
            largest = float(values.abs().max())
            self.beyond.setdefault(name, f"up to {largest:.2g}, whose mean square overflows float32")

    def _describe(self, values: Tensor) -> str:
        if bool(values.isnan().any()):
            return "it holds NaN"
        largest = float(values.abs().max())
        return f"{largest:.2g}, where {self.activations} ends at {self.largest:.5g}"
