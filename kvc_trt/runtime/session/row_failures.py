"""Failures of a single row, in its sampling, its text or its stop rules, which end that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from kvc_trt.runtime.session.row import Row

Failures: TypeAlias = dict[int, BaseException]
"""The error of each row that failed, by its number."""


@contextmanager
def failure_of(row: Row, failed: Failures) -> Iterator[None]:
    """Record any error of the block as the failure of its row; only KeyboardInterrupt is raised.

    A panic of the tokenizer's library, or an exit in a callback, is not an `Exception`, but is recorded as well.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failed[row.identity] = error
