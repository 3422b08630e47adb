"""The page of the study of RocketKV's two stages, written from its records."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.records import Record
from benchmarks.studies.study import Study, Written
from benchmarks.studies.two_stages.measure import NAME, measure


def page(records: Sequence[Record]) -> Written:
    """Write the page."""
    raise NotImplementedError(len(records))


STUDY = Study(NAME, measure, page)
