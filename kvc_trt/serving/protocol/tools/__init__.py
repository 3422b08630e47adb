"""Tool calls: the tools of a request, grammars that make a model call them, and its calls in OpenAI's form.

`choice.py` reads a request's fields, `formats.py` has the forms in which models write calls, `grammars.py` forces calls
of that form, and `wire.py` writes the calls and reasoning that `kvc_trt.tool_calls` finds in an answer.
"""

from __future__ import annotations

from kvc_trt.serving.protocol.tools.choice import ToolUse, tool_use
from kvc_trt.serving.protocol.tools.formats import PARSERS, ToolFormat, format_of
from kvc_trt.serving.protocol.tools.wire import chunk_of, message_of

__all__ = ["PARSERS", "ToolFormat", "ToolUse", "chunk_of", "format_of", "message_of", "tool_use"]
