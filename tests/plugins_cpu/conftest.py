from __future__ import annotations

from tests.backends.onnxruntime.conftest import make_program
from tests.plugins_cpu.libraries import bf16_library, instructions, library

__all__ = ["bf16_library", "instructions", "library", "make_program"]
