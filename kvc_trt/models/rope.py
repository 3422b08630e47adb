"""Rotary position tables (RoPE: Su et al. 2021, arXiv 2104.09864), shared by the graphs and the reference.

Computed once on the host in the order `transformers` computes them, so that rounding agrees as well: float32 inverse
frequencies, float32 product with the position, then cosine and sine. The power alone is taken in float64 and rounded,
because the float32 `pow` of numpy and torch differ in the last bit; at position 100,000 that bit is visible.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.config import LongRope, ModelConfig, RopeScaling, Yarn

Float32Array = NDArray[np.float32]


def inverse_frequencies(config: ModelConfig, longest: int, own_base: float | None = None) -> Float32Array:
    """Return the angle per position of each rotary pair, scaled as the model wants: float32 [head_size / 2].

    `longest` is the engine's longest sequence, which chooses LongRoPE's factors. `own_base` is `Attention.rotary_base`.

    Pair i are the channels i and i + head_size/2. Where only some channels rotate, they are the first pairs, and the
    angle of the others is zero (`kvc_trt.models.family_weights` orders a checkpoint's channels so).
    """
    channels, scaling = config.rotary_channels, config.rotary_scaling
    if own_base is not None:
        frequencies = unscaled_frequencies(own_base, channels)
    elif isinstance(scaling, Yarn):
        frequencies = _yarn(config.rotary_base, channels, scaling)
    elif isinstance(scaling, LongRope):
        factors = np.array(scaling.factors(longest), np.float32)
        frequencies = np.float32(1.0) / (factors * _powers(config.rotary_base, channels))
    else:
        frequencies = scaled(unscaled_frequencies(config.rotary_base, channels), scaling)
    return np.pad(frequencies, (0, (config.head_size - channels) // 2))


def query_scale(config: ModelConfig, layer: int) -> Float32Array | None:
    """Return the factors of a layer's queries before they rotate, float32 [head_size]; None if all are 1.

    Attention divides by sqrt(head_size): another scale is put into the query, where every reader of queries sees it,
    votes and page scores included. So is the square of YaRN's or LongRoPE's factor of cosines and sines, in channels
    that rotate.
    """
    size, own, attention = config.head_size, config.description.attention_scale, config.attention(layer)
    factors = np.full(size, 1.0 if own is None else own * math.sqrt(size))
    scaled = attention.rotary and attention.rotary_base is None
    if isinstance(config.rotary_scaling, Yarn | LongRope) and scaled:
        half = config.rotary_channels // 2
        factors.reshape(2, -1)[:, :half] *= config.rotary_scaling.attention_factor**2
    return None if (factors == 1).all() else factors.astype(np.float32)


def rotary_choice(config: ModelConfig, longest: int) -> str | None:
    """Return one line on the rotary factors that an engine's longest sequence decides for all prompts; None without a
    choice."""
    scaling = config.rotary_scaling
    if not isinstance(scaling, LongRope):
        return None
    original = scaling.original_max_position_embeddings
    side = "longer than" if longest > original else "within"
    return f"LongRoPE's factors are those of sequences {side} {original:,} tokens, whatever the length of a prompt"


def longest_alike(config: ModelConfig, longest: int) -> int:
    """Return the longest sequence of which an engine rotates as one does whose longest has `longest` tokens."""
    scaling, whole = config.rotary_scaling, config.max_position_embeddings
    if not isinstance(scaling, LongRope) or longest > scaling.original_max_position_embeddings:
        return whole
    return min(whole, scaling.original_max_position_embeddings)


def unscaled_frequencies(base: float, channels: int) -> Float32Array:
    """Return base^(-2i/D) of each pair i of D channels that rotate: float32 [channels / 2]."""
    frequencies: Float32Array = np.float32(1.0) / _powers(base, channels)
    return frequencies


def _powers(base: float, channels: int) -> Float32Array:
    exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    powers: Float32Array = np.power(float(base), exponents.astype(np.float64)).astype(np.float32)
    return powers


def scaled(frequencies: Float32Array, scaling: RopeScaling | None) -> Float32Array:
    """Return the frequencies as `scaling` stretches them."""
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        stretched: Float32Array = frequencies / np.float32(scaling.factor)
        return stretched
    return _llama3(frequencies, scaling)


def _yarn(base: float, channels: int, scaling: Yarn) -> Float32Array:
    """YaRN: few rotations within the original length are interpolated, many are kept, with a ramp between them."""
    pairs, powers, one = channels // 2, _powers(base, channels), np.float32(1)
    low, high = (
        pairs * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / math.log(base)
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low or 0.001)
    kept = one - np.clip(ramp, np.float32(0), one)
    stretched = one / (np.float32(scaling.factor) * powers)
    blended: Float32Array = stretched * (one - kept) + one / powers * kept
    return blended


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


def rotary_tables(
    config: ModelConfig, length: int, *, longest: int | None = None, own_base: float | None = None
) -> tuple[Float32Array, Float32Array]:
    """Cosine and sine of every position below `length`: two float32 arrays [length, head_size / 2].

    `longest` is the engine's longest sequence, if it is not `length`, and `own_base` that of some layers (see
    `inverse_frequencies`).
    """
    if length < 1:
        raise ValueError(f"length: expected at least 1 position, found {length}")
    frequencies = inverse_frequencies(config, longest or length, own_base)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies[None, :]
    return np.cos(angles), np.sin(angles)
