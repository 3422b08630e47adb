"""Errors in the form of OpenAI's API, with its types and codes."""

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
"""The number of characters of a field's name that an error shows; a client may send a name of any length."""
_STATUSES: dict[Reason, int] = {"invalid": 400, "busy": 503, "too late": 503, "cancelled": 503, "failed": 500}


class ApiError(Exception):
    """The error of a request that gets no answer: an HTTP status, and one line for the client."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.code = status, one_line(message), code
        """`code` is OpenAI's code of the error; None if it has none."""
        self.param = None if param is None else param[:_LONGEST_PARAM]
        """The name of the wrong field; None if no single field is wrong."""
        super().__init__(self.message)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object that the client gets, in a body or in an event of a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """Return the error, with status 400, for a request that is wrong in itself."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: ServingError) -> ApiError:
    """Return the error of a request that the engine refused, or could not answer."""
    return ApiError(_STATUSES[error.reason], error.message)
