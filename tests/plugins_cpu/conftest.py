from __future__ import annotations

from tests.plugins_cpu.libraries import _best_again, bf16_library, instructions, library

__all__ = ["_best_again", "bf16_library", "instructions", "library"]
