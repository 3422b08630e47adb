"""The tokens that an executor's caches keep and read, as the executor reports them for rows to record in proofs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from kvc_trt.proof import MadeBy
from kvc_trt.proof.lists import Lists

if TYPE_CHECKING:
    from kvc_trt.runtime.session.row import Row


class ReportedLists(Protocol):
    """The index lists of an executor's latest runs, by cache; -1 past the end of a list."""

    @property
    def made_by(self) -> MadeBy:
        """The engine and policy that chose the tokens."""

    def kept(self, row: int) -> Mapping[int, Lists]:
        """Return per cache the prompt positions [heads, width] that one row of the latest prefill has kept."""

    def read(self, row: int) -> Mapping[int, Lists]:
        """Return per cache the slots [heads, width] that one row of the latest decode step has read."""


def record_step(lists: ReportedLists, row: Row, place: int) -> None:
    """Record in a row, at `place` of the latest step, the slots that the step has read, if its answer has a proof."""
    if row.recorder is not None:
        row.recorder.step(lists.read(place))
