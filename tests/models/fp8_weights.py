"""Checkpoints in fp8, from random weights: in memory as a source of stored tensors, or as a directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.checkpoint import SINGLE_FILE
from kvc_trt.models.sources.fp8 import FP8, Fp8Source
from kvc_trt.models.sources.safetensors_file import TensorPlan, write_safetensors

LARGEST = 448.0
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
    "ignore": ["lm_head"],
}


class StoredFp8:
    """The tensors of an fp8 checkpoint: every projection in fp8 with its scale, except those that `wide` matches.

    `scale` is the shape of the scales: row, column ([out,1]) or tensor.
    """

    def __init__(self, config: ModelConfig, *, scale: str = "column", wide: str = "nothing") -> None:
        self._source, self._scale = RandomWeights(config, 0), scale
        names = self._source.names()
        self.in_fp8 = [n for n in names if re.fullmatch(r".*_proj\.weight", n) and not re.search(wide, n)]

    def names(self) -> list[str]:
        scales = [f"{name}_scale" for name in self.in_fp8]
        return [*self._source.names(), *scales, *(name.replace("weight", "input_scale") for name in self.in_fp8[:1])]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def dtype(self, name: str) -> str:
        return str(self.read(name).dtype)

    def read(self, name: str) -> Any:
        if name.endswith("input_scale"):
            return np.ones((), np.float32)
        base = name.removesuffix("_scale")
        values = self._source.read(base)
        if base not in self.in_fp8:
            return values.astype(numpy_dtype("bfloat16"))
        axis = None if self._scale == "tensor" else 1
        scales = (np.abs(values).max(axis=axis, keepdims=axis is not None) / LARGEST).astype(np.float32)
        if name == base:
            return (values / scales).astype(numpy_dtype(FP8))
        return np.asarray(scales.reshape(-1) if self._scale == "row" else scales)

    def read_rows(self, name: str, start: int, stop: int) -> Any:
        return self.read(name)[start:stop]

    def fingerprint(self) -> str:
        return self._source.fingerprint()


def fp8_source(config: ModelConfig, **options: str) -> Fp8Source:
    """Return an opened fp8 checkpoint."""
    return Fp8Source(StoredFp8(config, **options))


def fp8_directory(directory: Path, config: ModelConfig, fields: dict[str, Any], **options: str) -> Path:
    """Return the directory of an fp8 checkpoint; `fields` are those of config.json."""
    stored = StoredFp8(config, **options)
    plans = [
        TensorPlan(name, stored.dtype(name), stored.shape(name), lambda name=name: stored.read(name))
        for name in stored.names()
    ]
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / SINGLE_FILE, plans)
    (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": COMPRESSED}))
    return directory
