"""Prompts that are prefilled together, padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvc_trt.operators import PROMPT_BLOCK

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Prompts of one prefill: `input_ids` [B,S], padded on the right, and `prompt_lengths` [B]."""

    input_ids: Int64
    prompt_lengths: Int64

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def rows(self) -> list[list[int]]:
        """Return the prompts without padding."""
        return [self.input_ids[i, :n].tolist() for i, n in enumerate(self.prompt_lengths)]


def batch_of(prompts: Sequence[Sequence[int]], block: int = PROMPT_BLOCK) -> Batch:
    """Pad the prompts on the right to one length, a multiple of `block` tokens."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    ids = np.zeros((len(prompts), -(-int(lengths.max()) // block) * block), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Batch(ids, lengths)
