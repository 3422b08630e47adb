"""Failures of one row alone, in its sampling, its text or its stop rules: they end that row, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from kvc_trt.runtime.session.row import Row

Failures: TypeAlias = dict[int, BaseException]
"""The error of each row that failed, by its number."""


@contextmanager
def failure_of(row: Row, failed: Failures) -> Iterator[None]:
    """Note what the block raises as the failure of its row; only Ctrl-C is for everybody.

    A panic of the tokenizer's library, or an exit in a callback, is no `Exception`, and still of this row alone.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failed[row.identity] = error
