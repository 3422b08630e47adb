"""Turn errors into Triton's for clients; details that are not for clients go to Triton's log."""

from __future__ import annotations

import logging
from typing import Any

from typing_extensions import override

from kvc_trt.serving.errors import LOG, ServingError


def triton_error(pb_utils: Any, error: ServingError) -> Any:
    """Return Triton's error for a client, with the code of its reason."""
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
    """A handler that writes to Triton's log, which takes any text; its process's standard streams only take ASCII."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._logger.log_error(self.format(record))


def log_to(logger: Any) -> None:
    """Send the log of serving errors to Triton's logger alone."""
    LOG.handlers = [_ServersLog(logger)]
    LOG.propagate = False
