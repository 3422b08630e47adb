"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_SIZE_UNITS = {
    "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_BANDWIDTH_UNITS = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8,
}  # fmt: skip
_NUMBER = r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*"


def readable_size(count: float) -> str:
    """Return a number of bytes in powers of 1024: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def readable_count(count: float) -> str:
    """Return a number of things, such as parameters, with three digits in powers of 1000: `8.03B`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def bytes_of(text: str) -> int | None:
    """Return the bytes of a size such as `60MiB`, `1.5 gb` or `4096`, rounded down; None for anything else, and for 0.

    Units are of any case.
    """
    found = re.fullmatch(_NUMBER + r"([A-Za-z]*)\s*", text)
    unit = None if found is None else _SIZE_UNITS.get(found[2].lower() or "b")
    return None if found is None or unit is None else int(float(found[1]) * unit) or None


def bandwidth_of(text: str) -> float | None:
    """Return the bytes per second of a bandwidth such as `12.5GB/s` or `100Gbit/s`; None for anything else, and for 0.

    Units are powers of 1000.
    """
    found = re.fullmatch(_NUMBER + r"([A-Za-z]+)/s\s*", text)
    if found is None or found[2] not in _BANDWIDTH_UNITS:
        return None
    return float(found[1]) * _BANDWIDTH_UNITS[found[2]] or None
