"""The outcome of running one operator alone, and how its arrays are compared with the reference's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvc_trt import reference
from kvc_trt.backends.harness import Array
from kvc_trt.verify.rankings.near_ties import IndexComparison

NOTHING_COMPARED = IndexComparison()
FORGIVEN = ("bfloat16",)
"""Types whose own rounding, half a spacing or 2^-8 relative, exceeds the bar on operator outputs: a right result would
fail it. float16's is 2^-11, and stays inside of the bar. (docs/decisions/0012)"""


@dataclass(frozen=True)
class Outcome:
    """What one operator did: index lists judged, and errors relative to the largest reference value."""

    indices: IndexComparison = NOTHING_COMPARED
    value_error: float = 0.0
    copy_error: float = 0.0
    """Error of what is merely moved (caches, bounds, lengths); nothing but 0 is right."""
    computes: bool = False
    """Whether anything is computed to within rounding: `value_error` means something."""

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.indices + other.indices,
            larger(self.value_error, other.value_error),
            larger(self.copy_error, other.copy_error),
            self.computes or other.computes,
        )


def maximum_error(found: Array, expected: Array) -> float:
    """Largest difference over the largest expected magnitude (at least 1); NaN if anything is NaN.

    Differences are what they were before a bfloat16 output was rounded.
    """
    if not expected.size:
        return 0.0
    scale = max(1.0, float(np.abs(expected).max()))
    return float(differences(found, expected).max() / scale)


def differences(found: Array, expected: Array) -> Array:
    """How far off each element was before it was rounded, float64; NaN where either is.

    For a type in FORGIVEN this is the distance from `expected` to the nearest number that rounds to `found`: a result
    that is rounded correctly has none, and an error made before the rounding is seen whole. For other types it is the
    plain absolute difference.
    """
    here, wanted = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if found.dtype.name not in FORGIVEN:
            return np.abs(here - wanted)
        above, below = (np.nextafter(found, np.array(end, found.dtype)).astype(np.float64) for end in (np.inf, -np.inf))
        off: Array = np.maximum((below + here) / 2 - wanted, wanted - (here + above) / 2)
    return np.maximum(off, 0.0)


def exact(found: Array, expected: Array) -> float:
    """Largest difference; infinite where shapes differ or anything is NaN, which no maximum may hide."""
    if found.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    worst = float(difference.max()) if difference.size else 0.0
    return float("inf") if np.isnan(worst) else worst


def larger(one: float, other: float) -> float:
    """The maximum, NaN winning on either side: a NaN must not hide."""
    return float(np.maximum(one, other))


def attend_selected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor
) -> torch.Tensor:
    """Exact attention over given tokens: query [B,H,D], caches [B,G,C,D], selected [B,G,k] (-1 for none) -> [B,H,D]."""
    batch, groups = keys.shape[:2]
    grouped = query.reshape(batch, groups, -1, query.shape[-1])
    output = torch.empty_like(grouped)
    for row in range(batch):
        for head in range(groups):
            index = selected[row, head][selected[row, head] >= 0].long().clamp(max=keys.shape[2] - 1)
            output[row, head] = reference.dense_attention(
                grouped[None, row, head],
                keys[None, row, head, None, index].reshape(1, 1, -1, keys.shape[-1]),
                values[None, row, head, None, index].reshape(1, 1, -1, keys.shape[-1]),
                torch.tensor([len(index)]),
            )[0]
    return output.reshape(query.shape)
