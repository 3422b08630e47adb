"""Tools: which a request offers, how a model is made to call one, and its calls and thoughts in OpenAI's form.

`choice.py` reads a request's fields, `formats.py` says how models write calls, `grammars.py` forces calls of that form,
and `wire.py` writes what `kvc_trt.tool_calls` reads of an answer.
"""

from __future__ import annotations

from kvc_trt.serving.protocol.tools.choice import ToolUse, tool_use
from kvc_trt.serving.protocol.tools.formats import PARSERS, ToolFormat, format_of
from kvc_trt.serving.protocol.tools.wire import chunk_of, message_of

__all__ = ["PARSERS", "ToolFormat", "ToolUse", "chunk_of", "format_of", "message_of", "tool_use"]
