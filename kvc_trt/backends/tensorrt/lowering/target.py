"""What a graph is lowered for."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_FOR_GRAPHS = (10, 15)
"""From here on the parser reads RMSNormalization and RotaryEmbedding."""


@dataclass(frozen=True)
class Target:
    """One TensorRT and the plugins at hand."""

    tensorrt: tuple[int, int]
    """Major and minor version."""
    plugins: frozenset[str]
    """Operators that the plugin library offers, or their twins in the registry."""
