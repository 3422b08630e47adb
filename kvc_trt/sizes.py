"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_SIZE_UNITS = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_BANDWIDTH_UNITS = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8,
}  # fmt: skip
_QUANTITY = r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([A-Za-z]+)"


def readable_size(count: float) -> str:
    """Return a number of bytes in powers of 1024: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def bytes_of(text: str) -> int | None:
    """Return the bytes of a size such as `60MiB` or `1.5 GB`, rounded down; None for anything else, and for 0."""
    found = re.fullmatch(_QUANTITY + r"\s*", text)
    if found is None or found[2] not in _SIZE_UNITS:
        return None
    return int(float(found[1]) * _SIZE_UNITS[found[2]]) or None


def bandwidth_of(text: str) -> float | None:
    """Return the bytes per second of a bandwidth such as `12.5GB/s` or `100Gbit/s`; None for anything else, and for 0.

    Units are powers of 1000.
    """
    found = re.fullmatch(_QUANTITY + r"/s\s*", text)
    if found is None or found[2] not in _BANDWIDTH_UNITS:
        return None
    return float(found[1]) * _BANDWIDTH_UNITS[found[2]] or None
