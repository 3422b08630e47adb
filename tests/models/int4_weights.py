"""Checkpoints in four bits, in the layouts that AutoGPTQ, AutoAWQ and compressed-tensors publish, bit by bit.

`values` is the oracle: (level - zero) * scale in float64, from the numbers before they are packed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.checkpoint import SINGLE_FILE
from kvc_trt.models.sources.safetensors_file import TensorPlan, write_safetensors

AWQ_WORD = (0, 2, 4, 6, 1, 3, 5, 7)


def words(levels: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Levels [n,8m] as int32 [n,m]: bits 4i of a word are the level of its column order[i]."""
    found = np.zeros((levels.shape[0], levels.shape[1] // 8), np.uint32)
    for row, line in enumerate(levels):
        for word in range(found.shape[1]):
            for place, column in enumerate(order):
                found[row, word] |= np.uint32(int(line[8 * word + column]) << (4 * place))
    return found.view(np.int32)


@dataclass
class Matrix:
    """One matrix in four bits."""

    levels: Any
    """[out,in]"""
    zeros: Any
    """[out,groups]"""
    scales: Any
    """[out,groups]"""
    index: Any
    """The group of each channel, [in]."""

    @property
    def values(self) -> Any:
        return np.array(
            [
                [(int(q) - int(zero[g])) * float(scale[g]) for q, g in zip(row, self.index, strict=True)]
                for row, zero, scale in zip(self.levels, self.zeros, self.scales, strict=True)
            ]
        )


def matrix(seed: str, rows: int, columns: int, group: int, *, symmetric: bool, shuffled: bool, dtype: Any) -> Matrix:
    generator = np.random.default_rng(list(seed.encode()))
    group = columns if group == -1 else group
    groups = -(-columns // group)
    index = np.arange(columns) // group
    zeros = np.full((rows, groups), 8) if symmetric else generator.integers(1, 16, (rows, groups))
    return Matrix(
        generator.integers(0, 16, (rows, columns)),
        zeros,
        generator.uniform(0.002, 0.02, (rows, groups)).astype(dtype),
        generator.permutation(index) if shuffled else index,
    )


@dataclass
class Int4Checkpoint:
    """The tensors of a checkpoint in four bits; the projections are packed, and the rest is in float16."""

    config: ModelConfig
    method: str
    group: int = 32
    symmetric: bool = True
    shuffled: bool = False
    version: int = 1
    scale_type: Any = np.float16
    changes: dict[str, Any] = field(default_factory=dict)
    """Tensors that are replaced (None: absent)."""

    def __post_init__(self) -> None:
        source = RandomWeights(self.config, 0)
        self.matrices = {
            name: matrix(
                name, *source.shape(name), self.group, symmetric=self.symmetric, shuffled=self.shuffled,
                dtype=self.scale_type,
            )
            for name in source.names()
            if re.fullmatch(r".*_proj\.weight", name)
        }  # fmt: skip
        self.tensors = {
            name: source.read(name).astype(np.float16) for name in source.names() if name not in self.matrices
        }
        for name, one in self.matrices.items():
            self.tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in self._parts(one).items()}
        self.tensors = {name: value for name, value in (self.tensors | self.changes).items() if value is not None}

    def _parts(self, one: Matrix) -> dict[str, Any]:
        if self.method == "gptq":
            stored = one.zeros - 1 if self.version == 1 else one.zeros
            return {
                "qweight": np.ascontiguousarray(words(one.levels).T),
                "qzeros": words(stored.T),
                "scales": np.ascontiguousarray(one.scales.T),
                "g_idx": one.index.astype(np.int32),
            }
        if self.method == "awq":
            return {
                "qweight": words(one.levels.T, AWQ_WORD),
                "qzeros": words(one.zeros.T, AWQ_WORD),
                "scales": np.ascontiguousarray(one.scales.T),
            }
        parts = {
            "weight_packed": words(one.levels),
            "weight_scale": one.scales,
            "weight_shape": np.array(one.levels.shape, np.int64),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = np.ascontiguousarray(words(one.zeros.T).T)
        return parts | ({"weight_g_idx": one.index.astype(np.int32)} if self.shuffled else {})

    @property
    def settings(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        if self.method == "gptq":
            form = {1: "gptq", 2: "gptq_v2"}[self.version]
            return {
                "quant_method": "gptq", "bits": 4, "group_size": self.group, "desc_act": self.shuffled,
                "sym": self.symmetric, "checkpoint_format": form, "damp_percent": 0.1,
            }  # fmt: skip
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        weights = {
            "type": "int", "num_bits": 4, "symmetric": self.symmetric,
            "strategy": "channel" if self.group == -1 else "group",
            "group_size": None if self.group == -1 else self.group, "actorder": "group" if self.shuffled else None,
        }  # fmt: skip
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        form = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        return {**form, "config_groups": groups, "ignore": ["lm_head"]}

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return str(self.tensors[name].dtype)

    def read(self, name: str) -> Any:
        return self.tensors[name]

    def read_rows(self, name: str, start: int, stop: int) -> Any:
        return self.tensors[name][start:stop]

    def fingerprint(self) -> str:
        return "int4"

    def written(self, directory: Path, fields: dict[str, Any]) -> Path:
        """Return the directory of the checkpoint; `fields` are those of config.json."""
        plans = [
            TensorPlan(name, str(value.dtype), value.shape, lambda value=value: value)
            for name, value in self.tensors.items()
        ]
        directory.mkdir(parents=True, exist_ok=True)
        write_safetensors(directory / SINGLE_FILE, plans)
        (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": self.settings}))
        return directory
