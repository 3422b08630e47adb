"""What a graph is lowered for."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_FOR_GRAPHS = (10, 15)
"""From here on the parser reads RMSNormalization and RotaryEmbedding."""

FIRST_FOR_PLUGINS = (10, 14)
"""From here on a network without a parser has all that ours need: plugins that alias, and attention as a layer."""


@dataclass(frozen=True)
class Target:
    """One TensorRT and the plugins at hand."""

    tensorrt: tuple[int, int]
    """Major and minor version."""
    plugins: frozenset[str]
    """Operators that the plugin library offers, or the Python plugins in the registry."""
