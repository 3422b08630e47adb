"""The call of an operator by its name, for graphs that do not have its object yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.schema import PLUGIN_ATTRIBUTES

__all__ = ["PLUGIN_ATTRIBUTES", "call"]


def call(emit: Emitter, name: str, inputs: Sequence[Value], outputs: int | Sequence[str], **attributes: int) -> Any:
    """Append a node of one of our operators."""
    return emit.call(name, *inputs, outputs=outputs, domain=KVC_DOMAIN, **attributes, **PLUGIN_ATTRIBUTES)
