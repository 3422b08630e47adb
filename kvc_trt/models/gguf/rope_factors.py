"""`rope_freqs.weight`: the rotary scaling of Llama 3.1 and later, which a GGUF file carries as a table of divisors.

The table follows from four constants of the model's config.json. They are found again, so that an engine has the very
tables of the same model in any other format; a table that does not follow from such constants is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.config import RopeScaling
from kvc_trt.models.rope import scaled, unscaled_frequencies

_LOW, _HIGH = 1.0, 4.0
"""The blend of every published model with this scaling."""
_ORIGINAL_LENGTHS = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
_TOLERANCE = 1e-5
"""Relative; converters compute the table in another order of operations than models do."""


def check_shape(shape: tuple[int, ...], head_size: int, where: str) -> None:
    """Raise InputError unless there is one factor for each rotary pair; asked before the table is read."""
    expected = head_size // 2
    if shape != (expected,):
        raise InputError(f"{where}: shape {list(shape)}, expected [{expected}], one for each rotary pair")


def llama3_scaling(factors: NDArray[Any], base: float, head_size: int, where: str) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling` that divides the frequencies by `factors` [D/2]; None where all of them are 1.

    Raises InputError for any other table.
    """
    if not np.isfinite(factors).all() or (factors < 1).any():
        raise InputError(f"{where}: expected finite numbers of at least 1")
    if (factors == 1).all():
        return None
    largest = float(factors.max())
    unscaled = unscaled_frequencies(base, head_size)
    for length in _ORIGINAL_LENGTHS:
        stretched = scaled(unscaled, RopeScaling("llama3", largest, _LOW, _HIGH, length))
        if np.allclose(unscaled / stretched, factors, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": length,
            }
    raise InputError(
        f"{where}: these factors (largest {largest:g}) are not those of Llama 3.1's rotary scaling, the only one "
        "that is read from a table",
        hint="build from the model's Hugging Face directory, whose config.json says how it is scaled",
    )
