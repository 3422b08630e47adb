"""Numbers of bytes for people."""

from __future__ import annotations


def readable_size(count: float) -> str:
    """Return a number of bytes in powers of 1024: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
