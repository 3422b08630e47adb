"""Serves the engine beside this file with kvc-trt, which has to be installed in the Python that Triton runs."""

from collections.abc import Iterable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from kvc_trt.serving.triton.model import ServedModel


class TritonPythonModel:
    """What Triton looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Check the engine's digest, and load it."""
        self.model = ServedModel(pb_utils, args)

    def execute(self, requests: Iterable[Any]) -> None:
        """Take requests; each is answered through its own response sender."""
        self.model.execute(requests)

    def finalize(self) -> None:
        """Answer what is there, and end."""
        self.model.close()
