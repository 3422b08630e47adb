"""One operator as a model, run by the native library."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
from onnx import ModelProto

from kvc_trt.backends.onnxruntime import native
from kvc_trt.graph.rewrites.native import prepare, prepare_prefill
from tests.graph.small_models import SingleNode


class NativeNode(SingleNode):
    """Like `SingleNode`, by the library instead of the body."""

    def __init__(
        self, body, attributes: dict[str, int], library: Path, threads: int = 1, *, bf16: bool = False
    ) -> None:
        super().__init__(body, attributes)
        self.library, self.threads, self.bf16 = native.load(library), threads, bf16

    def session(self, types: tuple[str, ...]):
        model = prepare(self.model(types), self.library.operators)
        assert not model.functions, "the library lacks this operator for these attributes"
        if self.bf16:
            model = prepare_prefill(model, self.library.operators, bf16=True)
        return native_session(model, self.library, self.threads)


def native_session(model: ModelProto, library: native.NativeOperators, threads: int = 1):
    """Return a model that was prepared for the library, on it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    library.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
