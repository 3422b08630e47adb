"""An operator over caches in a format, alone in a model."""

from __future__ import annotations

from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators.schema import CACHE_FORMAT
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode


def stored_node(operator, form: str, numbers, size: int, dtype: str = "float32", **layout_numbers) -> SingleNode:
    """Return an operator over caches of that format, whose heads have `size` channels."""
    own, fp8 = CACHE_FORMATS[form], bool(numbers.get("fp8_bounds", True))
    layout = Layout(HeadShape(None, None, size), dtype=dtype, fp8_bounds=fp8, cache_format=own, numbers=layout_numbers)
    return SingleNode(operator.body(layout), {**numbers, CACHE_FORMAT.name: own.code})
