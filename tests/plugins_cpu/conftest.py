from __future__ import annotations

from tests.backends.onnxruntime.conftest import make_program
from tests.plugins_cpu.libraries import instructions, library

__all__ = ["instructions", "library", "make_program"]
