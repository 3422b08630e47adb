"""The page of the study of layers, written from its records."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.layer_importance.measure import NAME, measure
from benchmarks.studies.records import Record
from benchmarks.studies.study import Study, Written


def page(records: Sequence[Record]) -> Written:
    """Write the page."""
    return Written(f"{len(records)}", {})


STUDY = Study(NAME, measure, page)
