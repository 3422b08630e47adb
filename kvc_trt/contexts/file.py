"""A context as one safetensors file, read as hostile input and written whole or not at all.

The tensors are `logits` and those of `Context.tensors`; the metadata hold one JSON document (`ContextHeader`) and a
checksum, the SHA-256 of the file with 64 zeros in its place, so no byte can change unnoticed. That is integrity, not
authenticity: whoever can write the file can also write a new checksum.

Reading goes from the outside inwards: the safetensors header, the document, whether it fits the engine, every tensor's
type and shape, then the data with the checksum. Memory is taken only for shapes that the engine itself expects.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvc_trt.contexts.content import impossible
from kvc_trt.contexts.header import FORMAT, ContextHeader, check_lengths, header_of
from kvc_trt.contexts.packing import RowPacking
from kvc_trt.errors import InputError, describe
from kvc_trt.files.atomic import write_new_pieces
from kvc_trt.models.sources.safetensors_file import ALIGNMENT, PADDING_PREFIX, SafetensorsFile, TensorPlan, serialised
from kvc_trt.operators.linear.tokens import STATE
from kvc_trt.runtime.context import Array, Context
from kvc_trt.validation import validated

LOGITS, DOCUMENT, CHECKSUM = "logits", "kvc-trt context", "checksum"
UNSEALED = "0" * 64
LARGEST_DOCUMENT = 1 << 20
"""Characters; no model has caches enough for more."""

_OF_A_CACHE = re.compile(r"[a-z_]{1,40}\.(0|[1-9][0-9]{0,8})")
_OF_A_LINEAR_LAYER = re.compile(rf"({'|'.join(one.name for one in STATE)})\.(0|[1-9][0-9]{{0,8}})")


class StoredTensor(NamedTuple):
    """A tensor of a context's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_context(path: Path, context: Context, *, replace: bool = False) -> None:
    """Write a context to a new file; with `replace` over an old one.

    Raises InputError for a path that cannot be a new file and for a context that no engine can have made
    (`contexts/content.py`: NaN, infinities, impossible codes), UnsupportedEnvironment for a disk that is full.
    """
    _check_content(path, context)
    tensors = {LOGITS: context.logits, **context.tensors}
    plans = [
        TensorPlan(name, str(array.dtype), array.shape, lambda array=array: array)  # type: ignore[misc]
        for name, array in tensors.items()
    ]
    document = header_of(context).model_dump_json()
    unsealed, _ = serialised(plans, {DOCUMENT: document, CHECKSUM: UNSEALED})
    checksum = hashlib.sha256()
    for piece in unsealed:
        checksum.update(piece)
    sealed, _ = serialised(plans, {DOCUMENT: document, CHECKSUM: checksum.hexdigest()})
    write_new_pieces(path, sealed, replace=replace)


def read_context(path: Path, packing: RowPacking) -> Context:
    """Read a context for the engine of `packing`.

    Raises InputError for a file that is damaged, was changed, does not fit the engine or holds NaN, before its state
    is used.
    """
    file = SafetensorsFile(path)
    try:
        header = _read_header(file)
        header.fingerprint.check_same(packing.fingerprint, str(path), packing.other_turns)
        check_lengths(header, packing, str(path))
        _check_tensors(file, packing.layout(header.cache_lengths, header.logical_length), packing.limits.vocab_size)
        tensors = dict(_sealed_tensors(file))
    finally:
        file.close()
    context = Context(
        fingerprint=header.fingerprint,
        logical_length=header.logical_length,
        cache_lengths=tuple(header.cache_lengths),
        token_digest=header.tokens,
        logits=tensors.pop(LOGITS),
        tensors=tensors,
    )
    _check_content(path, context)
    return context


def inspect_context(path: Path) -> tuple[ContextHeader, list[StoredTensor]]:
    """Check a file without an engine; return its document and the tensors that it stores."""
    file = SafetensorsFile(path)
    try:
        header = _read_header(file)
        _check_names(file, len(header.cache_lengths))
        seal = _Seal(file)
        for name in file.entries:
            for piece in file.pieces(name):
                seal.add(piece)
        seal.check()
        entries = {name: file.entries[name] for name in file.names()}
    finally:
        file.close()
    return header, [StoredTensor(name, one.dtype, one.shape, one.nbytes) for name, one in entries.items()]


def _check_content(path: Path, context: Context) -> None:
    problem = impossible(context)
    if problem is not None:
        raise InputError(f"{path}: {problem}", hint="check the engine that made it: kvc-trt verify ENGINE_DIR")


def _check_names(file: SafetensorsFile, caches: int) -> None:
    """Raise InputError for a tensor that belongs to none of the caches, and to no linear layer."""
    for name in file.names():
        found = _OF_A_CACHE.fullmatch(name)
        if name != LOGITS and not _OF_A_LINEAR_LAYER.fullmatch(name) and (found is None or int(found[1]) >= caches):
            raise InputError(f"{file.path}: tensor {describe(name)} belongs to none of its {caches} caches")


def _read_header(file: SafetensorsFile) -> ContextHeader:
    """Return the checked document; InputError for a safetensors file that is no context of this format."""
    document = file.metadata.get(DOCUMENT)
    if document is None or file.metadata.keys() != {DOCUMENT, CHECKSUM} or len(document) > LARGEST_DOCUMENT:
        raise InputError(f"{file.path}: a safetensors file, but not a context", hint="kvc-trt context save makes one")
    try:
        fields = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file.path}: the context's document is not valid JSON ({describe(str(error))})") from error
    if isinstance(fields, dict) and fields.get("version") != FORMAT:
        found = describe(fields.get("version"))
        hint = "make it again with this version's kvc-trt context save"
        raise InputError(f"{file.path}: context format {found}, expected {FORMAT}", hint=hint)
    header = validated(ContextHeader, fields, str(file.path))
    if header.compatibility != header.fingerprint.compatibility:
        raise InputError(f"{file.path}: its compatibility digest does not follow from its other digests")
    return header


def _check_tensors(file: SafetensorsFile, layout: Mapping[str, tuple[str, tuple[int, ...]]], vocab_size: int) -> None:
    """Raise InputError unless the file holds exactly these tensors."""
    expected = {LOGITS: ("float32", (vocab_size,)), **layout}
    found = {name: (file.entries[name].dtype, file.entries[name].shape) for name in file.names()}
    for name in sorted(expected.keys() ^ found.keys()):
        state = "is missing" if name in expected else "does not belong to the engine's state"
        raise InputError(f"{file.path}: tensor {describe(name)} {state}")
    for name, (dtype, shape) in expected.items():
        if found[name] != (dtype, shape):
            own = f"{found[name][0]} {describe(list(found[name][1]))}"
            raise InputError(f"{file.path}: tensor {name} is {own}, expected {dtype} {list(shape)}")


def _sealed_tensors(file: SafetensorsFile) -> Iterator[tuple[str, Array]]:
    """Yield every tensor in the order of its bytes; at the end, InputError unless the checksum is that of the bytes."""
    seal = _Seal(file)
    for name in file.entries:
        array = file.read(name)
        seal.add(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if not name.startswith(PADDING_PREFIX):
            yield name, array
    seal.check()


class _Seal:
    """The checksum of a file, computed from its header and then from its tensors in the order of their bytes."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        self._recorded = file.metadata[CHECKSUM]
        header, written = file.header_bytes(), f'"{CHECKSUM}":"{self._recorded}"'.encode()
        if len(self._recorded) != len(UNSEALED) or header.count(written) != 1:
            raise InputError(f"{file.path}: its checksum is not written as this format writes it")
        for name, entry in file.entries.items():
            if name.startswith(PADDING_PREFIX) and entry.nbytes >= ALIGNMENT:
                raise InputError(f"{file.path}: {entry.nbytes} bytes of padding, expected fewer than {ALIGNMENT}")
        self._computed = hashlib.sha256(header.replace(written, f'"{CHECKSUM}":"{UNSEALED}"'.encode()))

    def add(self, content: memoryview) -> None:
        """Count the next bytes of the file."""
        self._computed.update(content)

    def check(self) -> None:
        """Raise InputError unless the checksum is that of all bytes."""
        if self._computed.hexdigest() != self._recorded:
            raise InputError(
                f"{self._file.path} was changed: its checksum is {describe(self._recorded)}, "
                f"its content has {self._computed.hexdigest()}",
                hint="make it again with kvc-trt context save",
            )
