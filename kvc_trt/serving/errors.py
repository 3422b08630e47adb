"""The reasons why requests get no answer, in words that every server can translate, without details of this machine."""

from __future__ import annotations

import logging
import uuid
from typing import Literal

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError

Reason = Literal["invalid", "busy", "too late", "cancelled", "failed"]
"""invalid: the request itself is wrong. busy: there is no room for it now. too late: its deadline passed before its
answer was complete. cancelled: its caller or the end of the server ended it. failed: the server could not answer it."""

LOG = logging.getLogger("kvc_trt.serving")


class ServingError(Exception):
    """A request that was refused, or that ended without an answer. The message is for its caller."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message


def serving_error(error: Exception) -> ServingError:
    """Return the error that a caller may see; details of an internal failure go to this machine's log alone."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, Busy):
        return ServingError("busy", error.message)
    if isinstance(error, DeadlineMissed):
        return ServingError("too late", error.message)
    if isinstance(error, Cancelled):
        return ServingError("cancelled", error.message)
    return ServingError("failed", logged(error))


def logged(error: Exception) -> str:
    """Write a failure's traceback to the log, and return a message for the caller with the id of the log entry."""
    identity = uuid.uuid4().hex[:12]
    LOG.error("request failed, id %s", identity, exc_info=error)
    return f"the server could not answer this request; its log says why, under the id {identity}"


def invalid(error: InputError) -> ServingError:
    """Return the error for a request that is wrong in itself; its message goes to the caller unchanged."""
    return ServingError("invalid", error.message)
