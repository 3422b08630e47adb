"""Errors: clients get one of Triton's errors, and details that are not for clients go to Triton's log."""

from __future__ import annotations

import logging
from typing import Any

from kvc_trt.serving.errors import LOG, ServingError


def triton_error(pb_utils: Any, error: ServingError) -> Any:
    """Return a client's error with Triton's code for its reason."""
    kinds = pb_utils.TritonError
    codes = {
        "invalid": kinds.INVALID_ARG,
        "busy": kinds.UNAVAILABLE,
        "too late": kinds.UNAVAILABLE,
        "cancelled": kinds.CANCELLED,
        "failed": kinds.INTERNAL,
    }
    return kinds(error.message, codes[error.reason])


class _ServersLog(logging.Handler):
    """Writes to Triton's log, which takes any text; the standard streams of its process take ASCII alone."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        self._logger.log_error(self.format(record))


def log_to(logger: Any) -> None:
    """Let the errors of serving go to Triton's logger alone."""
    LOG.handlers = [_ServersLog(logger)]
    LOG.propagate = False
