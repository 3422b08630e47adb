"""One mapping of a weight file for all sessions that read it.

ONNX Runtime maps a file of weights once per session, so two graphs of one engine would count each page twice against a
limit of resident memory, and would read the same pages again. Here the file is mapped once, and all sessions use its
tensors in place.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.graph.rewrites.prune import read_names
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.quantised_linear import QUANTISED_ROWS

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto
    from onnxruntime import OrtValue, SessionOptions

    from kvc_trt.files.held import HeldFile

_REFUSES_LINKS = "add_external_initializers_from_files_in_memory"
"""An attribute of versions that refuse a link out of `_FOLDER`: later ones than 1.23, the newest for Python 3.10."""
_FOLDER = "session.model_external_initializers_file_folder_path"
_EMPTY = Path(os.devnull)
"""Reading weights from it is an error, not zeros."""
_FLOAT32 = 1
"""TensorProto.FLOAT."""


class SharedWeights:
    """A weight file, mapped for as long as this object lives, which must outlive the sessions that use it."""

    def __init__(self, file: HeldFile) -> None:
        self._file, self._path = file, file.path
        self._bytes: NDArray[np.uint8] = np.frombuffer(file.map(), np.uint8)
        self._lent: dict[tuple[Any, ...], OrtValue] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def lend(self, model: ModelProto, options: SessionOptions) -> None:
        """Let a session with these options read the initializers that `model` has in the file, in place.

        Initializers that its optimiser folds, such as float16 weights that it widens to float32, are read while it
        loads, from this memory or through a link to the file that is held. The path of the file is never opened again.
        Initializers that are never folded are not read while it loads; afterwards `model` places them in an empty file.
        """
        values = {one.name: value for one in model.graph.initializer if (value := self.value(one)) is not None}
        for name, value in values.items():
            options.add_initializer(name, value)
        if not hasattr(options, _REFUSES_LINKS):
            options.add_session_config_entry(_FOLDER, self._folder_of_a_link())
            return
        # These versions copy every initializer that they are given to fold, all at once, which reads it.
        unfolded = never_folded(model.graph, {body.name for body in model.functions})
        for tensor in model.graph.initializer:
            if tensor.name in values and tensor.name in unfolded:
                for entry in tensor.external_data:
                    if entry.key == "location":
                        entry.value = _EMPTY.name
        options.add_session_config_entry(_FOLDER, str(_EMPTY.parent))
        foldable = {name: value for name, value in values.items() if name not in unfolded}
        options.add_external_initializers(list(foldable), list(foldable.values()))

    def _folder_of_a_link(self) -> str:
        """Return a folder that exists as long as this object, in which a link of the file's name leads to the held
        file."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="kvc-trt-")
        link = Path(self._folder.name) / self._path.name
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/self/fd/{self._file.descriptor}")
        return self._folder.name

    def value(self, tensor: TensorProto) -> OrtValue | None:
        """Return an initializer that lies in the file, in place; None for one that a graph holds itself.

        Raises InputError for one that lies in another file, or beyond the end of this one.
        """
        from onnx import helper
        from onnxruntime import OrtValue

        place = {entry.key: entry.value for entry in tensor.external_data}
        if not place:
            return None
        offset, length = int(place.get("offset", 0)), int(place.get("length", -1))
        if place.get("location") != self._path.name or not 0 <= offset <= offset + length <= self._bytes.size:
            raise InputError(f"{self._path.parent}: a graph looks for {describe(tensor.name)} at {describe(place)}")
        key = (offset, tensor.data_type, *tensor.dims)
        if key not in self._lent:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            values = self._bytes[offset : offset + length].view(dtype).reshape(tuple(tensor.dims))
            self._lent[key] = OrtValue.ortvalue_from_numpy(values)
        return self._lent[key]


def never_folded(graph: GraphProto, bodies: Collection[str]) -> set[str]:
    """Return the initializers with which no optimiser computes.

    They are those that only native operators without a body read, matrices of lookups, and float32 matrices of
    products. 16-bit matrices of products are not among them, because the optimiser converts them to float32.
    """
    single = {one.name for one in graph.initializer if one.data_type == _FLOAT32}
    constants = {one.name for one in graph.initializer}
    folded = {output.name for output in graph.output}
    for node in graph.node:
        names = read_names([node])
        if names <= constants:
            constants |= set(node.output)
            folded |= names
        elif node.domain != KVC_DOMAIN or node.op_type in bodies:
            folded |= names - _unread(node, single)
    return {one.name for one in graph.initializer} - folded


def _unread(node: NodeProto, single: set[str]) -> set[str]:
    """Return the inputs that stay unread until a node runs; `single` are initializers in float32."""
    if node.op_type == QUANTISED_ROWS.name:
        return set(node.input)
    if node.op_type == "Gather":
        return {node.input[0]}
    return single.intersection(node.input[1:2]) if node.op_type == "Gemm" else set()
