"""Weights: safetensors files, and the index of their shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.checkpoint import INDEX_FILE, Checkpoint
from kvc_trt.models.sources.safetensors_file import DTYPES, SafetensorsFile, TensorPlan, serialised
from tests.conftest import TINY_MODEL
from tests.fuzz.kind import SAME, Comparison, Kind, Mutator
from tests.fuzz.mutation.containers import SAFETENSORS, packed
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import JSON, of_trees

LARGEST_READ = 1 << 22
"""Bytes; larger tensors are read by pieces, and only their first rows at once."""


class Safetensors(Kind):
    name = "safetensors"
    native = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mutators: Sequence[Mutator] = (*RAW, *[of_trees(SAFETENSORS)] * 4, *[_made_of_nothing] * 2)

    def seeds(self) -> Sequence[bytes]:
        random = np.random.default_rng(1)
        kinds = [dtype for dtype in DTYPES.values() if not dtype.startswith("float8")]

        def plan(index: int, dtype: str) -> TensorPlan:
            shape = ((), (3,), (2, 3), (0, 4), (1, 2, 3))[index % 5]
            values: NDArray[Any] = np.asarray(random.integers(0, 2, shape)).astype(
                dtype if dtype != "bfloat16" else "float32"
            )
            return TensorPlan(f"layer.{index}", str(values.dtype), shape, lambda: values)

        plans = [plan(index, dtype) for index, dtype in enumerate(kinds)]
        lots = [plans, plans[:1], [], plans[3:6]]
        return [b"".join(serialised(lot, {"format": "pt"} if place % 2 else None)[0]) for place, lot in enumerate(lots)]

    def specimens(self) -> Sequence[bytes]:
        empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        huge = {"dtype": "U8", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}
        return [
            packed({f"t{number}": empty for number in range(20_000)}, b""),
            packed({"t": huge}, b""),
            packed({"t": {**empty, "shape": [0] * 64}}, b""),
            packed({"__metadata__": {"a": "b" * 1_000_000}}, b""),
            b"\xff" * 16,
            (1 << 40).to_bytes(8, "little") + b"{}",
            _with_length(json.dumps({f"t{n}": empty for n in range(20_000)}).encode()[:-1] + b', "t19999": {}}'),
            _with_length(b"[" * 100_000),
        ]

    def read(self, content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        file = SafetensorsFile(self.file(content, "model.safetensors"))
        try:
            found = {}
            for name in file.names():
                entry = file.entries[name]
                whole = file.read(name).tobytes() if entry.nbytes <= LARGEST_READ else b""
                found[name] = (entry.dtype, entry.shape, whole)
                for _ in file.pieces(name):
                    pass
                if entry.shape and entry.shape[0]:
                    file.read_rows(name, 0, 1 if entry.nbytes <= LARGEST_READ else 0)
            file.digest()
            file.header_bytes()
            return found
        finally:
            file.close()

    def compared(self, content: bytes, found: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Comparison:
        """Compare with the safetensors package: the same names, types, shapes and bytes."""
        try:
            with safe_open(self.folder / "model.safetensors", framework="numpy") as theirs:
                names = {name for name in theirs.keys() if not name.startswith("__padding__.")}  # noqa: SIM118
                if names != found.keys():
                    return Comparison(False, difference="names")
                for name, (dtype, shape, whole) in found.items():
                    if tuple(theirs.get_slice(name).get_shape()) != shape:
                        return Comparison(False, difference="shape")
                    if (
                        theirs.get_slice(name).get_dtype() not in DTYPES
                        or DTYPES[theirs.get_slice(name).get_dtype()] != dtype
                    ):
                        return Comparison(False, difference="dtype")
                    if not dtype.startswith(("float8", "bfloat16")) and theirs.get_tensor(name).tobytes() != whole:
                        return Comparison(False, difference="bytes")
        except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
            return Comparison(False, refused=f"{type(error).__name__}: {str(error)[:60]}")
        return SAME


class Shards(Kind):
    """The index that says which file holds which tensor."""

    name = "shards"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mutators = (*RAW, *[of_trees(JSON)] * 6)
        self._directory = folder / "checkpoint"

    def seeds(self) -> Sequence[bytes]:
        from safetensors.numpy import save_file

        from kvc_trt.models.sources.hugging_face import read_config

        self._directory.mkdir(exist_ok=True)
        (self._directory / "config.json").write_text(json.dumps(TINY_MODEL))
        weights = RandomWeights(read_config(self._directory), 0)
        names, weight_map = weights.names(), {}
        for number in range(2):
            shard = f"model-{number + 1:05}-of-00002.safetensors"
            mine = names[number::2]
            save_file({name: weights.read(name) for name in mine}, self._directory / shard)
            weight_map |= dict.fromkeys(mine, shard)
        return [json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()]

    def specimens(self) -> Sequence[bytes]:
        shards = ("\ud800.safetensors", "\0.safetensors", "../config.json.safetensors", "/dev/zero.safetensors",
                  "a" * 300 + ".safetensors", ".safetensors",
                  "model-00001-of-00002.safetensors/.safetensors")  # fmt: skip
        many = {f"t{number}": f"{number}.safetensors" for number in range(50_000)}
        return [
            *(json.dumps({"weight_map": {"a": shard}}).encode() for shard in shards),
            json.dumps({"weight_map": many}).encode(),
            b"[" * 200_000,
            b'{"weight_map":' * 50_000,
        ]

    def read(self, content: bytes) -> None:
        self.file(content, f"checkpoint/{INDEX_FILE}")
        checkpoint = Checkpoint(self._directory)
        try:
            for name in checkpoint.names():
                checkpoint.shape(name)
                checkpoint.read_rows(name, 0, 1)
        finally:
            checkpoint.close()


def _with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


_ITEMS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4,
          "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "F8_E8M0": 1, "C64": 8, "F4": 1, "F6_E2M3": 1}  # fmt: skip


def _made_of_nothing(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return a file whose sizes agree with each other, with odd names, types, shapes and an odd order."""
    header: dict[str, Any] = {}
    end = 0
    for number in range(random.randint(0, 6)):
        name = random.choice(("", "a", "__padding__.0", "a.b", "\0", "\ud800", "🙂", "__metadata", "../x")) + str(
            number
        )
        dtype = random.choice(list(_ITEMS))
        shape = [random.choice((0, 1, 1, 2, 3, 5)) for _ in range(random.choice((0, 1, 2, 3, 40)))]
        size = _ITEMS[dtype] * int(np.prod(shape, dtype=object)) if shape else _ITEMS[dtype]
        size = size if size < 1 << 16 else 0
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    entries = list(header.items())
    random.shuffle(entries)
    return packed(dict(entries), random.randbytes(end))


KINDS = (Safetensors, Shards)
