"""The part of Triton's ModelConfig that an exported model uses, as protobuf messages made here.

`config.pbtxt` is text with fields by name. Their numbers are those of Triton's model_config.proto, but nothing is ever
read or written by number (docs/decisions/0024-config-pbtxt.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from kvc_trt.errors import InputError

_PACKAGE = "inference"
_ENUMS = {
    "DataType": {"TYPE_INVALID": 0, "TYPE_BOOL": 1, "TYPE_UINT32": 4, "TYPE_UINT64": 5, "TYPE_INT32": 8,
                 "TYPE_FP32": 11, "TYPE_STRING": 13},
    "Kind": {"KIND_AUTO": 0, "KIND_GPU": 1, "KIND_CPU": 2, "KIND_MODEL": 3},
}  # fmt: skip
_MESSAGES = {
    "ModelConfig": [
        (1, "name", "string"), (2, "platform", "string"), (17, "backend", "string"),
        (15, "ensemble_scheduling", "ModelEnsembling"), (16, "model_warmup", "repeated ModelWarmup"),
        (19, "model_transaction_policy", "ModelTransactionPolicy"), (3, "version_policy", "ModelVersionPolicy"),
        (4, "max_batch_size", "int32"), (5, "input", "repeated ModelInput"), (6, "output", "repeated ModelOutput"),
        (7, "instance_group", "repeated ModelInstanceGroup"), (14, "parameters", "map ModelParameter"),
    ],
    "ModelInput": [(1, "name", "string"), (2, "data_type", "DataType"), (4, "dims", "repeated int64"),
                   (8, "optional", "bool")],
    "ModelOutput": [(1, "name", "string"), (2, "data_type", "DataType"), (3, "dims", "repeated int64")],
    "ModelTransactionPolicy": [(1, "decoupled", "bool")],
    "ModelVersionPolicy": [(3, "specific", "Specific")],
    "Specific": [(1, "versions", "repeated int64")],
    "ModelInstanceGroup": [(4, "kind", "Kind"), (2, "count", "int32")],
    "ModelParameter": [(1, "string_value", "string")],
    "ModelEnsembling": [(1, "step", "repeated Step")],
    "Step": [(1, "model_name", "string"), (2, "model_version", "int64"), (3, "input_map", "map string"),
             (4, "output_map", "map string")],
    "ModelWarmup": [(1, "name", "string"), (2, "batch_size", "uint32"), (3, "inputs", "map WarmupInput"),
                    (4, "count", "uint32")],
    "WarmupInput": [(1, "data_type", "DataType"), (2, "dims", "repeated int64"), (5, "input_data_file", "string")],
}  # fmt: skip
"""Message -> its fields: number, name and type. The keys of a map are strings."""
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def new_config() -> Any:
    """Return an empty ModelConfig message."""
    return _message_class()()


def config_text(config: Any) -> str:
    """Return the text of config.pbtxt, checked by parsing it again."""
    text = str(text_format.MessageToString(config))
    if parsed(text) != config:
        raise AssertionError("the text of config.pbtxt does not say what was meant")
    return text


def parsed(text: str) -> Any:
    """Return the ModelConfig message of an exported config.pbtxt; InputError for a text that does not parse."""
    try:
        return text_format.Parse(text, new_config())
    except text_format.ParseError as error:
        raise InputError(f"config.pbtxt: {error}") from error


@cache
def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="kvc_trt_model_config.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        file.enum_type.add(name=name).value.extend(
            descriptor_pb2.EnumValueDescriptorProto(name=value, number=number) for value, number in values.items()
        )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, of_type in fields:
            _add_field(message, number, field, of_type)
    pool = descriptor_pool.DescriptorPool()  # its own: another package's ModelConfig may be in the common one
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.ModelConfig"))


def _add_field(message: Any, number: int, name: str, of_type: str) -> None:
    *label, plain = of_type.split()
    added = message.field.add(name=name, number=number)
    added.label = _Field.LABEL_REPEATED if label else _Field.LABEL_OPTIONAL
    if label == ["map"]:  # a map is a list of messages with a key and a value
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", plain)
        added.type, added.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
    elif plain in _SCALARS:
        added.type = _SCALARS[plain]
    else:
        added.type = _Field.TYPE_ENUM if plain in _ENUMS else _Field.TYPE_MESSAGE
        added.type_name = f".{_PACKAGE}.{plain}"
