"""Which engines have passed the quick ladder after their build, so that "up to date" never hides a failed one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvc_trt.engine.directory import Engine
from kvc_trt.engine.manifest import sealed
from kvc_trt.engine.stages import cache_root


def is_verified(engine: Engine) -> bool:
    """Whether this very engine, byte for byte, has passed."""
    return _marker(engine).is_file()


def record_verified(engine: Engine) -> None:
    """Remember in the cache that this engine has passed."""
    marker = _marker(engine)
    marker.parent.mkdir(mode=0o700, exist_ok=True)
    marker.touch()


def _marker(engine: Engine) -> Path:
    return cache_root() / "verified" / hashlib.sha256(sealed(engine.manifest)).hexdigest()
