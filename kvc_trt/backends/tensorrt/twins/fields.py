"""The attributes of a plugin, read from outside: an engine file and a network are hostile input.

Every attribute of ours is an INT in ONNX, which TensorRT hands over as one INT32; all of them must be there, once each,
and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.backends.tensorrt.twins.report import Refusal
from kvc_trt.backends.tensorrt.twins.tables import Field, Operator

if TYPE_CHECKING:
    import tensorrt

_INT32 = 5  # PluginFieldType.INT32, for the message


def read_fields(operator: Operator, collection: tensorrt.PluginFieldCollection | None) -> dict[str, int]:
    """Value of every attribute. Raises Refusal with the field, what was expected and what was found."""
    if collection is None:
        raise Refusal("no fields")
    if len(collection) > len(operator.fields):
        raise Refusal(f"number of fields: expected {len(operator.fields)}, found {len(collection)}")
    known = {field.name: field for field in operator.fields}
    values: dict[str, int] = {}
    for found in collection:
        if found.name not in known:
            raise Refusal(f"field {str(found.name)[:64]}: unknown")
        if found.name in values:
            raise Refusal(f"field {found.name}: given twice")
        values[found.name] = _value(known[found.name], found)
    for field in operator.fields:
        if field.name not in values:
            raise Refusal(f"field {field.name}: missing")
    operator.check(values)
    return values


def _value(field: Field, found: tensorrt.PluginField) -> int:
    # Type and length first: the bindings read as many bytes from `data` as these two say.
    if found.type.name != "INT32" or found.size != 1:
        raise Refusal(
            f"field {field.name}: expected one INT32 (type {_INT32}, length 1), "
            f"found type {int(found.type)}, length {found.size}"
        )
    value = int(found.data[0])
    if not field.minimum <= value <= field.maximum:
        raise Refusal(f"field {field.name}: expected {field.minimum}..{field.maximum}, found {value}")
    return value
