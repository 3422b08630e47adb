"""Let the reference continue with an engine's codes, so that codes that rounding decides change nothing later.

Exact keys and values of engine and reference differ by rounding, and now and then rounding decides between two codes,
or between two scales of a whole vector. So the vectors that the reference stores are replaced by those that the
engine's codes stand for, once its own keys and values have been compared with the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.reference.model.caching import Tokens, as_stored
from kvc_trt.verify.codes.parts import read_parts
from kvc_trt.verify.codes.stored_tokens import head_of

if TYPE_CHECKING:
    from kvc_trt.graph.state import CacheSite
    from kvc_trt.verify.codes.stored_tokens import StoredTable


@dataclass
class KeysOff:
    """The errors of an engine's exact keys and values against the reference's."""

    vectors: int = 0
    errors: dict[int, float] = field(default_factory=dict)
    """The largest error by row, divided by the largest element of the same tokens (at least 1)."""
    places: dict[int, str] = field(default_factory=dict)
    """The place of the largest error by row."""

    def add(self, row: int, error: float, place: str) -> None:
        """Record one error of a row; NaN counts as larger than any number."""
        if not error <= self.errors.get(row, -1.0):
            self.errors[row], self.places[row] = error, place

    def of_rows(self, other: KeysOff, rows: Sequence[int]) -> KeysOff:
        """Return these figures, with those of `other` for some rows."""
        errors = {**self.errors, **{row: other.errors[row] for row in rows if row in other.errors}}
        places = {**self.places, **{row: other.places[row] for row in rows if row in other.places}}
        return KeysOff(self.vectors, errors, places)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error over all rows, and its place."""
        row = max(self.errors, key=lambda one: np.nan_to_num(self.errors[one], nan=np.inf), default=None)
        return (0.0, "") if row is None else (self.errors[row], self.places[row])


class FollowedCodes:
    """Replaces the vectors that the reference's caches give back by those of the engine's codes for the same tokens."""

    def __init__(self, sites: Sequence[CacheSite], tables: Mapping[int, tuple[StoredTable, StoredTable]]) -> None:
        self.off = KeysOff()
        self._tables = tables
        self._sites: dict[tuple[int, int], CacheSite] = {}
        for site in sites:
            number = sum(layer == site.layer for layer, _ in self._sites)
            self._sites[site.layer, number] = site

    def __call__(self, tokens: Tokens, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors that the cache of `tokens` gives back for exact keys and values [B,heads,n,D]."""
        site = self._sites[tokens.layer, tokens.group]
        own = as_stored(tokens, keys, values)
        where = tokens.positions if tokens.positions.ndim == 3 else tokens.positions[:, None]
        positions = where.expand(keys.shape[:3]).numpy()
        found = []
        for kind, table, exact, read in zip(
            ("key", "value"), self._tables[site.cache], (keys, values), own, strict=True
        ):
            known = table.knows(positions)
            self._measure(site, kind, positions, known, table.exact_at(positions), exact.numpy())
            theirs = torch.from_numpy(read_parts(table.at(positions), table.form)).to(read.dtype)
            found.append(torch.where(torch.from_numpy(known)[..., None], theirs, read))
        return found[0], found[1]

    def _measure(
        self, site: CacheSite, kind: str, positions: NDArray[np.int64], known: NDArray[np.bool_],
        theirs: NDArray[np.floating], ours: NDArray[np.floating],
    ) -> None:  # fmt: skip
        """Compare the exact vectors [B,heads,n,D] of tokens that both sides stored."""
        self.off.vectors += int(known.sum())
        with np.errstate(invalid="ignore"):
            errors = np.abs(theirs.astype(np.float64) - ours)
        for row, present in enumerate(known):
            if not present.any():
                continue
            scale = max(1.0, float(np.abs(ours[row][present]).max()))
            off = np.where(present[..., None], errors[row], 0.0) / scale
            head, token, channel = np.unravel_index(int(np.nan_to_num(off, nan=np.inf).argmax()), off.shape)
            place = f"{kind} of layer {site.layer}, row {row}, {head_of(site, int(head))}"
            place += f", token {positions[row, head, token]}, channel {channel}"
            self.off.add(row, float(off[head, token, channel]), place)
