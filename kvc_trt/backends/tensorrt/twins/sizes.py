"""Sizes behind the symbols of the tables, as far as they are known, and what binds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvc_trt.backends.tensorrt.twins.report import Refusal

NAMES: Mapping[str, str] = {
    "B": "batch", "H": "heads", "G": "kv heads", "D": "head size", "W": "window", "S": "prompt length", "C": "capacity",
    "P": "pages", "2D": "2 x head size", "K": "selected width",
}  # fmt: skip
"""Symbol -> its name in a message. P = ceil(C / page size)."""

_MOST = 2**31 - 1


class Sizes:
    """Grows by what tensors and attributes say; refuses what contradicts."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._values

    def __getitem__(self, symbol: str) -> int:
        return self._values[symbol]

    def fix(self, symbol: str, size: int, where: str) -> None:
        """Raise Refusal unless the size lies in 0..2^31-1 and is the one known before; `where` names who says so."""
        if not 0 <= size <= _MOST:
            raise Refusal(f"{where}: expected {NAMES[symbol]} in 0..{_MOST}, found {size}")
        if self._values.setdefault(symbol, size) != size:
            raise Refusal(f"{where}: expected {NAMES[symbol]} = {self._values[symbol]}, found {size}")

    def bind(self, name: str, symbols: tuple[str, ...], dims: Iterable[int]) -> None:
        """Take the sizes that a tensor's dimensions give to the symbols of its shape."""
        found = tuple(dims)
        check_rank(name, symbols, len(found))
        for symbol, size in zip(symbols, found, strict=True):
            self.fix(symbol, size, name)


def check_rank(name: str, symbols: tuple[str, ...], found: int) -> None:
    """Raise Refusal unless a tensor has as many dimensions as its shape names."""
    if found != len(symbols):
        raise Refusal(f"{name}: expected {len(symbols)} dimensions, found {found}")


def pages(capacity: int, page_size: int) -> int:
    """Pages of a cache, the last one possibly cut short."""
    return -(-capacity // page_size)
