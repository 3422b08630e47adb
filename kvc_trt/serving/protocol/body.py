"""The body of a request as one JSON object, and nothing else."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from kvc_trt.errors import describe
from kvc_trt.serving.protocol.errors import refused

LARGEST_BODY = 16 << 20
"""Bytes: several of the longest prompts. Reading hostile JSON of this size holds the interpreter for about a second."""


def json_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; ApiError, with status 400, for anything else."""
    try:
        body = json.loads(content, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise refused(f"the body is not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError):
        raise refused("the body is not valid JSON, or nested too deeply") from None
    if not isinstance(body, dict):
        raise refused(f"the body is {describe(body)}, expected a JSON object")
    return body


def _no_number(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(text)
