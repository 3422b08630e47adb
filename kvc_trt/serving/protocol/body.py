"""Parse the body of a request, which must be one JSON object."""

from __future__ import annotations

from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.files.foreign_json import foreign_json
from kvc_trt.serving.protocol.errors import refused

LARGEST_BODY = 16 << 20
"""The largest body in bytes; several of the longest prompts fit."""


def json_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; ApiError with status 400 for anything else."""
    try:
        body = foreign_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise refused(f"the body is not UTF-8 text (byte {error.start})") from None
    except InputError as error:
        raise refused(f"the body: {error.message}") from None
    except (ValueError, RecursionError):
        raise refused("the body is not valid JSON, or nested too deeply") from None
    if not isinstance(body, dict):
        raise refused(f"the body is {describe(body)}, expected a JSON object")
    return body
