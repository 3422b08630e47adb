"""A Hugging Face checkpoint directory: config.json, safetensors (one file or sharded), tokenizer.

Pickled weights (.bin, .pt, .pth) are never opened: unpickling runs code. A file may be a symbolic link only if it
stays inside the directory, or, in the Hub's cache, leads from a snapshot to the blobs of the same repository.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_json_input
from kvc_trt.models.family import DType
from kvc_trt.models.sources.containment import contained
from kvc_trt.models.sources.hugging_face import read_config, read_decoder_fields, states_dtype
from kvc_trt.models.sources.safetensors_file import SafetensorsFile
from kvc_trt.models.sources.text_part import stored_names
from kvc_trt.models.sources.tokenizer import tokenizer_files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LARGEST_INDEX = 32 << 20
"""Bytes; the index of 100,000 tensors has some 10 MiB."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint:
    """A `WeightSource` over a directory, with `.config` and the tokenizer's files.

    Headers are checked when opened. Values are not: NaN and infinite weights show when a build reads them.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not os.path.isdir(self.directory):
            raise InputError(f"{self.directory}: not a directory; expected a Hugging Face checkpoint")
        self.config = read_config(contained(self.directory, "config.json").parent)
        fields, beside_images = read_decoder_fields(self.directory / "config.json")
        self.quantisation: object = fields.get("quantization_config")
        """How config.json says that matrices are stored; None where they are floats."""
        self._files, home = _open_weights(self.directory)
        names = stored_names(home) if beside_images else {name: name for name in home}
        self._home = {name: (home[stored], stored) for name, stored in names.items()}
        if not states_dtype(fields):
            self.config = replace(self.config, dtype=self._usual_dtype() or self.config.dtype)
        self._fingerprint: str | None = None

    @property
    def tokenizer_path(self) -> Path | None:
        """tokenizer.json, or None where the checkpoint has none."""
        return next((path for path in self.tokenizer_files() if path.name == "tokenizer.json"), None)

    def tokenizer_files(self) -> list[Path]:
        """The files that an engine copies besides weights, of those that exist."""
        return tokenizer_files(self.directory)

    def names(self) -> list[str]:
        """Every tensor of the checkpoint, or of its text part, as if that stood alone."""
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        file, stored = self._home[name]
        return file.entries[stored].shape

    def dtype(self, name: str) -> str:
        """Stored type of one tensor (numpy's or ml_dtypes' name)."""
        file, stored = self._home[name]
        return file.entries[stored].dtype

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor in its stored type."""
        file, stored = self._home[name]
        return file.read(stored)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor."""
        file, stored = self._home[name]
        return file.read_rows(stored, start, stop)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of config and weights, reading every byte once."""
        if self._fingerprint is None:
            digest = hashlib.sha256(self.config.identity.encode())
            for name in sorted(self._files):
                digest.update(f"{name}\0{self._files[name].digest()}\n".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Close the weight files."""
        for file in self._files.values():
            file.close()

    def _usual_dtype(self) -> DType | None:
        sizes: Counter[str] = Counter()
        for file, stored in self._home.values():
            sizes[file.entries[stored].dtype] += file.entries[stored].nbytes
        return usual_dtype(sizes)


def usual_dtype(sizes: Mapping[str, int]) -> DType | None:
    """Return the type of floats that most bytes have, of bytes by type; None without floats. Codes are none."""
    floats: list[DType] = [dtype for dtype in get_args(DType) if sizes.get(dtype, 0) > 0]
    return max(floats, key=lambda dtype: sizes[dtype], default=None)


def has_weights(directory: Path) -> bool:
    """Return whether all weight files of a checkpoint are there."""
    if not os.path.exists(directory / INDEX_FILE):
        return os.path.exists(directory / SINGLE_FILE)
    return all(os.path.exists(directory / name) for name in _read_weight_map(contained(directory, INDEX_FILE)).values())


def _open_weights(directory: Path) -> tuple[dict[str, SafetensorsFile], dict[str, SafetensorsFile]]:
    """Open the weight files; returns them by name, and the file of each tensor."""
    if os.path.exists(directory / INDEX_FILE):
        return _open_shards(directory)
    if not os.path.exists(directory / SINGLE_FILE):
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)
        if pickled:
            raise InputError(
                f"{directory}: only pickled weights ({pickled[0]}), which can run code when opened; "
                "expected safetensors",
                hint="convert them in a sandbox: transformers' save_pretrained(..., safe_serialization=True)",
            )
        raise InputError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    file = SafetensorsFile(contained(directory, SINGLE_FILE))
    return {SINGLE_FILE: file}, dict.fromkeys(file.names(), file)


def _open_shards(directory: Path) -> tuple[dict[str, SafetensorsFile], dict[str, SafetensorsFile]]:
    index = contained(directory, INDEX_FILE)
    weight_map = _read_weight_map(index)
    files = {name: SafetensorsFile(contained(directory, name)) for name in sorted(set(weight_map.values()))}
    home = {name: file for file in files.values() for name in file.names()}
    if sum(len(file.names()) for file in files.values()) != len(home):
        raise InputError(f"{index}: a tensor is stored in two shards")
    for name, shard in weight_map.items():
        if home.get(name) is not files[shard]:
            raise InputError(f"{index}: tensor {describe(name)} is not in {describe(shard)}")
    if unlisted := sorted(set(home) - set(weight_map)):
        raise InputError(f"{index}: tensor {describe(unlisted[0])} is in a shard but not in the index")
    return files, home


def _read_weight_map(index: Path) -> dict[str, str]:
    content = read_json_input(index, LARGEST_INDEX)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or any(not isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index}: expected a weight_map from tensor to file name")
    if wrong := next((v for v in weight_map.values() if not v.endswith(".safetensors")), None):
        raise InputError(f"{index}: weights in {describe(wrong)}, expected .safetensors files only")
    return weight_map
