"""One mapping of a weight file for all sessions that read it.

ONNX Runtime maps a file of weights once per session, so two graphs of one engine would count each page twice against a
limit of resident memory, and would read in what the other has read. Here the file is mapped once, and every session
gets its tensors as they lie there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto
    from onnxruntime import OrtValue, SessionOptions


class SharedWeights:
    """A weight file, mapped for as long as this object lives: it has to outlive the sessions that it lends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        self._lent: dict[tuple[Any, ...], OrtValue] = {}

    def lend(self, model: ModelProto, options: SessionOptions) -> None:
        """Let a session with these options read the initializers that `model` has in the file, in place."""
        for tensor in model.graph.initializer:
            if (value := self.value(tensor)) is not None:
                options.add_initializer(tensor.name, value)

    def value(self, tensor: TensorProto) -> OrtValue | None:
        """Return an initializer that lies in the file, in place; None for one that a graph holds itself."""
        from onnx import helper
        from onnxruntime import OrtValue

        place = {entry.key: entry.value for entry in tensor.external_data}
        if place.get("location") != self._path.name:
            return None
        offset, length = int(place["offset"]), int(place["length"])
        key = (offset, tensor.data_type, *tensor.dims)
        if key not in self._lent:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            values = self._bytes[offset : offset + length].view(dtype).reshape(tuple(tensor.dims))
            self._lent[key] = OrtValue.ortvalue_from_numpy(values)
        return self._lent[key]
