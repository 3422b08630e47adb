"""The tensors of a request and of its answer: names, types and shapes, and what they hold.

Every tensor has a batch dimension of one row, as the OpenAI frontend of Triton expects it. `pb_utils` is Triton's
module `triton_python_backend_utils`, which exists only inside of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.proof import document_of
from kvc_trt.serving.answer import Piece
from kvc_trt.serving.fields import FIELDS, Kind
from kvc_trt.serving.request import ServedRequest

MANY = -1


@dataclass(frozen=True)
class TensorType:
    """Type and size of a tensor, without its batch dimension."""

    data_type: str
    length: int = 1
    """MANY for any number."""


_OF_KIND = {
    Kind.TEXT: TensorType("STRING"),
    Kind.TEXTS: TensorType("STRING", MANY),
    Kind.TOKENS: TensorType("INT32", MANY),
    Kind.INTEGER: TensorType("INT32"),
    Kind.LARGE_INTEGER: TensorType("UINT64"),
    Kind.NUMBER: TensorType("FP32"),
    Kind.SWITCH: TensorType("BOOL"),
}
INPUTS: Mapping[str, TensorType] = MappingProxyType({name: _OF_KIND[field.kind] for name, field in FIELDS.items()})
OUTPUTS: Mapping[str, TensorType] = MappingProxyType(
    {
        "text_output": TensorType("STRING"),
        "output_ids": TensorType("INT32", MANY),
        "finish_reason": TensorType("STRING"),
        "num_input_tokens": TensorType("UINT32"),
        "num_output_tokens": TensorType("UINT32"),
        "output_log_probs": TensorType("FP32", MANY),
        "kv_cache_tokens_kept": TensorType("INT32"),
        "kv_cache_tokens_total": TensorType("INT32"),
        "kv_cache_tokens_reused": TensorType("INT32"),
        "kv_proof": TensorType("STRING"),
    }
)
_NUMPY = {"STRING": np.object_, "INT32": np.int32, "UINT32": np.uint32, "FP32": np.float32}


def read_request(request: Any) -> dict[str, object]:
    """Return the fields of a request: its tensors, and the parameters that Triton has found no tensor for.

    Raises InputError for a tensor that holds several values where one is expected.
    """
    given: dict[str, object] = dict(json.loads(request.parameters() or "{}"))
    for tensor in request.inputs():
        given[tensor.name()] = _values(tensor.name(), tensor.as_numpy())
    return given


def _values(name: str, array: NDArray[Any]) -> object:
    # The shortest number that rounds to a float32 is what the client wrote: 0.7, and not 0.699999988.
    flat = [float(str(one)) for one in array.reshape(-1)] if array.dtype == np.float32 else array.reshape(-1).tolist()
    if name in INPUTS and INPUTS[name].length == MANY:
        return flat
    if len(flat) != 1:
        raise InputError(f"{name} has {len(flat)} values, expected one: a request is one prompt")
    return flat[0]


def written(pb_utils: Any, piece: Piece, request: ServedRequest, input_tokens: int) -> Any:
    """Return the response that holds a piece of an answer, with what its request wants besides the text."""
    tensors = [
        pb_utils.Tensor(name, np.array([values], dtype=_NUMPY[OUTPUTS[name].data_type]))
        for name, values in _outputs(piece, request, input_tokens)
    ]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _outputs(piece: Piece, request: ServedRequest, input_tokens: int) -> Iterator[tuple[str, list[Any]]]:
    """Counts of output tokens are of this piece, as those of vLLM's model are."""
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
