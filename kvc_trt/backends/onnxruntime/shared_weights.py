"""One mapping of a weight file for all sessions that read it.

ONNX Runtime maps a file of weights once per session, so two graphs of one engine would count each page twice against a
limit of resident memory, and would read in what the other has read. Here the file is mapped once, and every session
gets its tensors as they lie there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto
    from onnxruntime import OrtValue, SessionOptions

    from kvc_trt.files.held import HeldFile

_FILES_IN_MEMORY = "add_external_initializers_from_files_in_memory"
"""ONNX Runtime 1.23, the newest for Python 3.10, does not have it."""
_FOLDER = "session.model_external_initializers_file_folder_path"


class SharedWeights:
    """A weight file, mapped for as long as this object lives: it has to outlive the sessions that it lends to."""

    def __init__(self, file: HeldFile) -> None:
        self._file, self._path = file, file.path
        self._bytes: NDArray[np.uint8] = np.frombuffer(file.map(), np.uint8)
        self._lent: dict[tuple[Any, ...], OrtValue] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def lend(self, model: ModelProto, options: SessionOptions) -> None:
        """Let a session with these options read the initializers that `model` has in the file, in place.

        What its optimiser folds, such as float16 weights of which it makes float32, it reads from a file of that name;
        here that is this memory, or a link to the file that is held. The path of the file is never opened again.
        """
        for tensor in model.graph.initializer:
            if (value := self.value(tensor)) is not None:
                options.add_initializer(tensor.name, value)
        if hasattr(options, _FILES_IN_MEMORY):
            getattr(options, _FILES_IN_MEMORY)([self._path.name], [self._bytes], [self._bytes.size])
        else:
            options.add_session_config_entry(_FOLDER, self._folder_of_a_link())

    def _folder_of_a_link(self) -> str:
        """Return a folder, there for as long as this object, in which the file's name leads to what is held."""
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
