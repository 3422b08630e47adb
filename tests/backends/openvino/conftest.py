from __future__ import annotations

from tests.backends.onnxruntime.conftest import make_program

__all__ = ["make_program"]
