"""Is an engine right? From single operators up to whole tasks."""

from __future__ import annotations

import importlib.util

from kvc_trt.errors import UnsupportedEnvironment


def require_torch(way_out: str = "pip install 'kvc-trt[verify]'") -> None:
    """UnsupportedEnvironment where PyTorch is missing: said before any work, not after it."""
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedEnvironment("verification compares with PyTorch, which is not installed", hint=way_out)
