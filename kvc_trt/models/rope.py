"""Rotary position tables (RoPE: Su et al. 2021, arXiv 2104.09864), shared by the graphs and the reference.

Computed once on the host in the order `transformers` computes them, so that rounding agrees as well: float32 inverse
frequencies, float32 product with the position, then cosine and sine. The power alone is taken in float64 and rounded,
because the float32 `pow` of numpy and torch differ in the last bit; at position 100,000 that bit is visible.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.config import ModelConfig, RopeScaling

Float32Array = NDArray[np.float32]


def inverse_frequencies(config: ModelConfig) -> Float32Array:
    """Return the angle per position of each rotary pair, scaled as the model wants: float32 [head_size / 2]."""
    return scaled(unscaled_frequencies(config.rotary_base, config.head_size), config.rotary_scaling)


def unscaled_frequencies(base: float, head_size: int) -> Float32Array:
    """Return base^(-2i/D) of each rotary pair i: float32 [head_size / 2]."""
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    powers = np.power(float(base), exponents.astype(np.float64)).astype(np.float32)
    frequencies: Float32Array = np.float32(1.0) / powers
    return frequencies


def scaled(frequencies: Float32Array, scaling: RopeScaling | None) -> Float32Array:
    """Return the frequencies as `scaling` stretches them."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        stretched: Float32Array = frequencies / np.float32(scaling.factor)
        return stretched
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Float32Array, scaling: RopeScaling) -> Float32Array:
    """Llama 3.1: short wavelengths are kept, long ones are divided by the factor, those between are interpolated."""
    context = np.float32(scaling.original_max_position_embeddings)
    low, high = np.float32(scaling.low_frequency_factor), np.float32(scaling.high_frequency_factor)
    factor, one = np.float32(scaling.factor), np.float32(1.0)
    # torch divides a number by a tensor as reciprocal times number: the same two roundings here.
    wavelengths = (one / frequencies) * np.float32(2 * np.pi)
    scaled = np.where(wavelengths > context / low, frequencies / factor, frequencies)
    smooth = ((one / wavelengths) * context - low) / (high - low)
    interpolated = (one - smooth) * scaled / factor + smooth * scaled
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return np.where(between, interpolated, scaled).astype(np.float32)


def rotary_tables(config: ModelConfig, length: int) -> tuple[Float32Array, Float32Array]:
    """Cosine and sine of every position below `length`: two float32 arrays [length, head_size / 2]."""
    if length < 1:
        raise ValueError(f"length: expected at least 1 position, found {length}")
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse_frequencies(config)[None, :]
    return np.cos(angles), np.sin(angles)
