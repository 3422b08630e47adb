"""The metadata of a GGUF file under its architecture's name, as families ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.gguf.header import GgufHeader, GgufTensor, Scalar

EPSILON = "attention.layer_norm_rms_epsilon"
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
"""The rotary base of sliding layers."""
SHARPNESS = "rope.scaling.attn_factor"
"""A factor of cosines and sines, which llama.cpp multiplies by YaRN's own."""
EXPERTS, EXPERTS_OF_A_TOKEN = "expert_count", "expert_used_count"
LATER_TOKENS = "nextn_predict_layers"
"""How many of the last layers predict the tokens after the next one."""
MOST_LAYERS = 1024


class GgufKeys:
    """Values by key, without the architecture's name before it; errors name the whole key."""

    def __init__(
        self, header: GgufHeader, architecture: str, read: Callable[[GgufTensor], NDArray[Any]] | None = None
    ) -> None:
        """Take a header; `read` gives the values of a small tensor that is part of the configuration."""
        self.header = header
        self.architecture = architecture
        self._read = read

    def __getitem__(self, key: str) -> Scalar | None:
        """Return a key's one value, None where it is absent; InputError for an array."""
        return self.header.scalar(self.spelled(key))

    def spelled(self, key: str) -> str:
        """Return the key as the file spells it."""
        return f"{self.architecture}.{key}"

    def wrong(self, key: str, expected: str) -> InputError:
        """Return the error for a key with another value than `expected`."""
        found = self.header.metadata.get(self.spelled(key))
        found = found.tolist() if isinstance(found, np.ndarray) else found
        return InputError(f"{self.header.source}: {self.spelled(key)} is {describe(found)}, expected {expected}")

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return tensor in self.header.tensors

    def rows(self, tensor: str, axis: int = 0) -> int | None:
        """Return the extent of one axis of a tensor; None if there is no such tensor or axis."""
        found = self.header.tensors.get(tensor)
        return found.shape[axis] if found is not None and axis < len(found.shape) else None

    def numbers(self, tensor: str, count: int) -> list[float]:
        """Return the values of a tensor of `count` numbers; InputError for another shape, before anything is read."""
        found = self.header.tensors[tensor]
        if found.shape != (count,):
            raise InputError(
                f"{self.header.source}: tensor {tensor}: shape {list(found.shape)}, expected [{count}], one for each "
                "rotary pair"
            )
        assert self._read is not None
        values: list[float] = self._read(found).astype(np.float32).tolist()
        return values

    def sliding_fields(self, every: int) -> dict[str, Any]:
        """Return `sliding_window` and `layer_types` of config.json; the pattern of absent keys is one full of `every`.

        The pattern is a number n, if the last of every n layers is full, or one flag for each layer, true if it slides.
        """
        window, layers = self[WINDOW], self["block_count"]
        if not window or type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
            return {"sliding_window": None, "layer_types": ["full_attention"] * min(_as_count(layers), MOST_LAYERS)}
        found = self.header.metadata.get(self.spelled(PATTERN), every)
        if isinstance(found, np.ndarray):
            if found.shape != (layers,) or found.dtype.kind not in "biu":
                raise self.wrong(PATTERN, f"{layers} flags, one for each layer")
            slides = [bool(flag) for flag in found]
        elif type(found) is int and found >= 1:
            slides = [(layer + 1) % found != 0 for layer in range(layers)]
        else:
            raise self.wrong(PATTERN, "a number of layers, or a flag for each")
        return {
            "sliding_window": window,
            "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        }


def _as_count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 1
