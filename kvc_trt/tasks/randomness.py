"""One random generator per sample, so that a sample never depends on which others were drawn before it."""

from __future__ import annotations

import hashlib

import numpy as np


def sample_rng(stream: str, seed: int, index: int) -> np.random.Generator:
    """A generator that depends on nothing but its arguments; streams of different names never overlap."""
    digest = hashlib.sha256(f"{stream}/{seed}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
