"""Engines behind the servers that users already run. The root of this package holds the code that all servers share,
and names no server."""

from __future__ import annotations

from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.errors import ServingError
from kvc_trt.serving.request import ServedRequest, parse_request
from kvc_trt.serving.served_answer import Answer, End, Piece

__all__ = ["Answer", "End", "Piece", "ServedEngine", "ServedRequest", "ServingError", "parse_request"]
