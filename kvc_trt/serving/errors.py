"""Why a request got no answer, in few words that every server can translate, and without anything of this machine."""

from __future__ import annotations

import logging
import uuid
from typing import Literal

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError

Reason = Literal["invalid", "busy", "too late", "cancelled", "failed"]
"""invalid: the request cannot be right. busy: there is no room for it now. too late: its deadline came before its
answer. cancelled: its caller, or the end of the server, ended it. failed: the server could not answer it."""

LOG = logging.getLogger("kvc_trt.serving")


class ServingError(Exception):
    """A request that was refused, or that ended without an answer. The message is for its caller."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message


def serving_error(error: Exception) -> ServingError:
    """Return the error as a caller may see it; what went wrong inside goes to the log, and stays on this machine."""
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
    """Write a failure's traceback to the log, and return what its caller may know: an id that leads to it."""
    identity = uuid.uuid4().hex[:12]
    LOG.error("request failed, id %s", identity, exc_info=error)
    return f"the server could not answer this request; its log says why, under the id {identity}"


def invalid(error: InputError) -> ServingError:
    """Return the error of a check that looks at the request alone, whose message the caller needs."""
    return ServingError("invalid", error.message)
