"""What a graph is lowered for."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_FOR_GRAPHS = (10, 15)
"""RMSNormalization and RotaryEmbedding are read from here on, and a plugin named by a node wins over a function body."""


@dataclass(frozen=True)
class Target:
    """One TensorRT and the plugins at hand."""

    tensorrt: tuple[int, int]
    """Major and minor version."""
    plugins: frozenset[str]
    """Operators that the plugin library offers, or their twins in the registry."""
