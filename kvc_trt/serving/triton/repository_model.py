"""Serves the engine or tokenizer beside this file with kvc-trt, which has to be installed in the Python that Triton
runs."""

from collections.abc import Iterable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from kvc_trt.serving.triton.loading import load_model


class TritonPythonModel:
    """The class that Triton looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Check the digest of the model's files, and load the model."""
        self.model = load_model(pb_utils, args)

    def execute(self, requests: Iterable[Any]) -> list[Any] | None:
        """Take requests; those of a decoupled model are answered later, through their response senders."""
        return self.model.execute(requests)

    def finalize(self) -> None:
        """Answer the requests received, and end."""
        self.model.close()
