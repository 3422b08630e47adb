"""Errors as OpenAI's API writes them, with its types and codes."""

from __future__ import annotations

from typing import Any

from kvc_trt.errors import one_line
from kvc_trt.serving.errors import Reason, ServingError

TOO_LONG = "context_length_exceeded"
NO_MODEL = "model_not_found"
NO_FIELD = "unknown_parameter"
NOT_SUPPORTED = "unsupported_parameter"
WRONG_KEY = "invalid_api_key"
_LONGEST_PARAM = 100
"""Characters; the name of a field may be anything."""
_STATUSES: dict[Reason, int] = {"invalid": 400, "busy": 503, "too late": 503, "cancelled": 503, "failed": 500}


class ApiError(Exception):
    """A request that gets no answer: an HTTP status, and the one line that the client reads."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.code = status, one_line(message), code
        """`code` is OpenAI's word for the error, where it has one."""
        self.param = None if param is None else param[:_LONGEST_PARAM]
        """The field that is wrong, where it is one."""
        super().__init__(self.message)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object that the client gets, in a body or in an event of a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """Return the error for a request that cannot be right."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: ServingError) -> ApiError:
    """Return the error of a request that the engine refused, or could not answer."""
    return ApiError(_STATUSES[error.reason], error.message)
