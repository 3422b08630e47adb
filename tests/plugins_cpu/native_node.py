"""One operator as a model, run by the native library."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from kvc_trt.backends.onnxruntime import native
from kvc_trt.graph.native import prepare
from tests.graph.small_models import SingleNode


class NativeNode(SingleNode):
    """Like `SingleNode`, by the library instead of the body."""

    def __init__(self, body, attributes: dict[str, int], library: Path, threads: int = 1) -> None:
        super().__init__(body, attributes)
        self.library, self.threads = native.load(library), threads

    def session(self, types: tuple[str, ...]):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 4
        self.library.register(options)
        model = prepare(self.model(types), self.library.operators)
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
