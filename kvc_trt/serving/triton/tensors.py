"""The tensors of requests and answers: their names, types and shapes, and conversion from and to them.

Every tensor has a batch dimension of one row, as the OpenAI frontend of Triton expects it. `pb_utils` is Triton's
module `triton_python_backend_utils`, which exists only inside of the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.proof import document_of
from kvc_trt.runtime.kinds import Kind
from kvc_trt.serving.fields import FIELDS, Field
from kvc_trt.serving.request import ServedRequest, parse_request
from kvc_trt.serving.served_answer import Piece

MANY = -1

Outputs = Iterable[tuple[str, NDArray[Any]]]
"""The tensors of one response, by name."""
WriteOutputs = Callable[[Piece, int], Outputs]
"""Return the tensors of a response for a piece of an answer and the number of tokens in the prompt."""


@dataclass(frozen=True)
class TensorType:
    """The type and the shape of a tensor, without its batch dimension."""

    data_type: str
    dims: tuple[int, ...] = (1,)
    """The shape; MANY stands for any size."""


_OF_KIND = {
    Kind.TEXT: TensorType("STRING"),
    Kind.TEXTS: TensorType("STRING", (MANY,)),
    Kind.TOKENS: TensorType("INT32", (MANY,)),
    Kind.INTEGER: TensorType("INT32"),
    Kind.LARGE_INTEGER: TensorType("UINT64"),
    Kind.NUMBER: TensorType("FP32"),
    Kind.SWITCH: TensorType("BOOL"),
}


def type_of(field: Field) -> TensorType:
    """Return the type of the tensor that holds a field."""
    return _OF_KIND[field.kind]


OPENAI_REQUEST = "openai_request"
OPENAI_OUTPUTS: Mapping[str, TensorType] = MappingProxyType(
    {"openai_response": TensorType("STRING"), "openai_status": TensorType("INT32")}
)
"""The tensors of `openai.py`."""
INPUTS: Mapping[str, TensorType] = MappingProxyType(
    {**{name: type_of(field) for name, field in FIELDS.items()}, OPENAI_REQUEST: TensorType("STRING")}
)
OUTPUTS: Mapping[str, TensorType] = MappingProxyType(
    {
        "text_output": TensorType("STRING"),
        "output_ids": TensorType("INT32", (MANY,)),
        "finish_reason": TensorType("STRING"),
        "num_input_tokens": TensorType("UINT32"),
        "num_output_tokens": TensorType("UINT32"),
        "output_log_probs": TensorType("FP32", (MANY,)),
        "kv_cache_tokens_kept": TensorType("INT32"),
        "kv_cache_tokens_total": TensorType("INT32"),
        "kv_cache_tokens_reused": TensorType("INT32"),
        "kv_proof": TensorType("STRING"),
        **OPENAI_OUTPUTS,
    }
)
_NUMPY = {"STRING": np.object_, "INT32": np.int32, "UINT32": np.uint32, "UINT64": np.uint64, "FP32": np.float32}


def read_request(request: Any) -> tuple[ServedRequest, WriteOutputs]:
    """Return a request with the function that writes its answer's tensors; InputError if it is wrong."""
    asked = parse_request({**parameters_of(request), **tensors_of(request, INPUTS)})
    return asked, partial(_outputs, asked)


def parameters_of(request: Any) -> dict[str, object]:
    """Return the parameters of a request: those of its fields that are not tensors of the model."""
    return dict(json.loads(request.parameters() or "{}"))


def tensors_of(request: Any, types: Mapping[str, TensorType]) -> dict[str, object]:
    """Return the values of a request's tensors by name: a list if `types` allows several values, otherwise one value.

    Raises InputError for a tensor with several values if one is expected.
    """
    return {tensor.name(): _values(tensor, types) for tensor in request.inputs()}


def _values(tensor: Any, types: Mapping[str, TensorType]) -> object:
    name, array = tensor.name(), tensor.as_numpy()
    # The shortest decimal that rounds to the float32 is the client's own number: 0.7, not 0.699999988.
    flat = [float(str(one)) for one in array.reshape(-1)] if array.dtype == np.float32 else array.reshape(-1).tolist()
    if name in types and types[name].dims != (1,):
        return flat
    if len(flat) != 1:
        raise InputError(f"{name} has {len(flat)} values, expected one: a request is one prompt")
    return flat[0]


def array_of(values: Any, of_type: TensorType) -> NDArray[Any]:
    """Return an output tensor's array; `values` include the batch dimension."""
    return np.array(values, dtype=_NUMPY[of_type.data_type])


def response(pb_utils: Any, outputs: Outputs) -> Any:
    """Return Triton's response with these tensors."""
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, array) for name, array in outputs])


def _outputs(request: ServedRequest, piece: Piece, input_tokens: int) -> Outputs:
    """Return the tensors of a piece: its text, and the further outputs that its request asks for."""
    return ((name, array_of([values], OUTPUTS[name])) for name, values in _named(request, piece, input_tokens))


def _named(request: ServedRequest, piece: Piece, input_tokens: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the names and values of a piece's tensors.

    Counts of output tokens are per piece, as in vLLM's model.
    """
    yield "text_output", [piece.text.encode("utf-8")]
    if "output_ids" in request.returns or request.token_ids is not None:
        yield "output_ids", list(piece.token_ids)
    if "num_input_tokens" in request.returns:
        yield "num_input_tokens", [input_tokens]
    if "num_output_tokens" in request.returns:
        yield "num_output_tokens", [len(piece.token_ids)]
    if piece.logprobs is not None:
        yield "output_log_probs", list(piece.logprobs)
    if piece.end is None:
        return
    if "finish_reason" in request.returns:
        yield "finish_reason", [piece.end.finish_reason.encode("utf-8")]
    if "kv_cache_tokens" in request.returns:
        yield "kv_cache_tokens_kept", [piece.end.kept_tokens]
        yield "kv_cache_tokens_total", [piece.end.logical_tokens]
        yield "kv_cache_tokens_reused", [piece.end.reused_tokens]
    if piece.end.kv_proof is not None:
        yield "kv_proof", [json.dumps(document_of(piece.end.kv_proof)).encode()]
