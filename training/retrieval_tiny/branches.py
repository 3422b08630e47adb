"""Many questions about one context in one sequence, none of which sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Branches:
    """Several continuations of one context in one sequence, each of which sees the context and itself alone.

    A sequence is the context, then the branches one after another. `positions` [n] are those of RoPE: every branch
    starts where the context ends. `visible` [n - context, n] says what a token of a branch sees. `answers` [T] are the
    positions, in branches, whose predictions are wanted.
    """

    context: int
    positions: Tensor
    visible: Tensor
    answers: Tensor

    @staticmethod
    def of(context: int, lengths: Sequence[int], answers: Tensor) -> Branches:
        """Branches of these lengths after one context."""
        branch = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        offsets = torch.cat([torch.arange(length) for length in lengths])
        within = (branch[:, None] == branch[None, :]) & (offsets[:, None] >= offsets[None, :])
        visible = torch.cat([torch.ones(len(branch), context, dtype=torch.bool), within], dim=1)
        return Branches(context, torch.cat([torch.arange(context), context + offsets]), visible, answers)
