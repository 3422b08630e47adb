"""The standard ONNX operators that bodies of our operators consist of, as PyTorch functions (ONNX operators, opset 23).

An operation takes the node's input tensors and its attributes, and returns its outputs. Inputs may be on two devices:
shapes, and values computed from shapes alone, stay on the CPU, so that the host knows them without waiting for the
device. An operation that combines tensors moves those of the CPU to the device of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Attributes = Mapping[str, Any]
Operation = Callable[[Sequence[Tensor], Attributes], Tensor | tuple[Tensor, ...]]

DTYPES = {
    1: torch.float32, 3: torch.int8, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16,
    11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""PyTorch's types by the numbers of ONNX's TensorProto.DataType."""


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on one device: that of the first one that is not on the CPU, if any."""
    device = next((one.device for one in tensors if one.device.type != "cpu"), None)
    return list(tensors) if device is None else [one.to(device) for one in tensors]


def _pointwise(function: Callable[..., Tensor]) -> Operation:
    """Return the operation that applies `function` to the inputs, broadcast."""
    return lambda inputs, attributes: function(*together(inputs))


def _alike(function: Callable[[Tensor], Tensor]) -> Operation:
    """Return the operation that gives equal elements equal results, wherever they are in a tensor.

    On a CPU PyTorch computes the remainder of a row by another function than whole vectors; in float64 the two round to
    the same float32."""
    return lambda inputs, attributes: (
        function(inputs[0]) if inputs[0].device.type != "cpu" else function(inputs[0].double()).to(inputs[0].dtype)
    )


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    """Return the operation that folds any number of inputs."""
    return lambda inputs, attributes: reduce(function, together(inputs))


def _divide(left: Tensor, right: Tensor) -> Tensor:
    return left / right if left.is_floating_point() else torch.div(left, right, rounding_mode="trunc")


def _axes(inputs: Sequence[Tensor], rank: int) -> list[int]:
    """Return the axes of a reduction, its optional second input; all without one."""
    return inputs[1].tolist() if len(inputs) > 1 else list(range(rank))


def _reduction(function: Callable[..., Tensor]) -> Operation:
    def run(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
        x = inputs[0]
        return function(x, dim=_axes(inputs, x.ndim), keepdim=bool(attributes.get("keepdims", 1)))

    return run


def _sum(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return x.sum(dim, keepdim=keepdim, dtype=x.dtype)


def _length(order: int) -> Operation:
    def norm(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(x, order, dim=dim, keepdim=keepdim)
        return found

    return _reduction(norm)


def _place_of(function: Callable[..., Tensor]) -> Operation:
    """Return ArgMin or ArgMax; of equal elements the first."""
    return lambda inputs, attributes: function(
        inputs[0], dim=attributes.get("axis", 0), keepdim=bool(attributes.get("keepdims", 1))
    )


def _top_k(inputs: Sequence[Tensor], attributes: Attributes) -> tuple[Tensor, ...]:
    """TopK; of equal elements the lower index comes first, which a stable sort keeps in either direction."""
    x, count, axis = inputs[0], int(inputs[1]), attributes.get("axis", -1)
    found = torch.sort(x, dim=axis, descending=bool(attributes.get("largest", 1)), stable=True)
    return tuple(part.narrow(axis, 0, count).contiguous() for part in found)


def _cumulated(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x, axis = inputs[0], int(inputs[1])
    total = x.cumsum(axis, dtype=x.dtype)
    return total - x if attributes.get("exclusive", 0) else total


def _cast(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    return inputs[0].to(DTYPES[attributes["to"]])


def _cast_like(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    return inputs[0].to(inputs[1].dtype)


def _softmax(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    return torch.softmax(inputs[0], dim=attributes.get("axis", -1))


def _shape(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    return torch.tensor(inputs[0].shape[attributes.get("start", 0) : attributes.get("end")], dtype=torch.int64)


def _reshape(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x = inputs[0]
    return x.reshape([n or x.shape[axis] for axis, n in enumerate(inputs[1].tolist())])


def _expand(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x = inputs[0]
    sizes = inputs[1].tolist()
    x = x.view([1] * (len(sizes) - x.ndim) + list(x.shape)) if len(sizes) > x.ndim else x
    sizes = [1] * (x.ndim - len(sizes)) + sizes
    return x.expand([own if size == 1 else size for own, size in zip(x.shape, sizes, strict=True)])


def _unsqueeze(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x, axes = inputs[0], inputs[1].tolist()
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    return inputs[0].squeeze(tuple(inputs[1].tolist()))


def _transpose(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    return inputs[0].permute(attributes["perm"])


def _joined(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    return torch.cat(together(inputs), dim=attributes["axis"])


def _split(inputs: Sequence[Tensor], attributes: Attributes) -> tuple[Tensor, ...]:
    x, axis = inputs[0], attributes.get("axis", 0)
    if len(inputs) == 1:
        return x.chunk(attributes["num_outputs"], axis)
    found: tuple[Tensor, ...] = torch.split(x, inputs[1].tolist(), axis)
    return found


def _slice(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x, starts, ends, *rest = inputs
    axes = rest[0].tolist() if rest else range(len(starts))
    steps = rest[1].tolist() if len(rest) > 1 else [1] * len(starts)
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes, steps, strict=True):
        places = range(x.shape[axis])[start:end:step]
        if step == 1:
            x = x.narrow(axis, places.start, len(places))
        else:
            x = x.index_select(axis, torch.tensor(places, dtype=torch.int64, device=x.device))
    return x


def _pad(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x, pads = inputs[0], inputs[1].tolist()
    value = inputs[2].item() if len(inputs) > 2 else 0
    axes = inputs[3].tolist() if len(inputs) > 3 else list(range(x.ndim))
    if not any(pads):
        return x
    shape, inside = list(x.shape), [slice(None)] * x.ndim
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        inside[axis] = slice(before, before + shape[axis])
        shape[axis] += before + after
    padded = x.new_full(shape, value)
    padded[tuple(inside)] = x
    return padded


def _gather(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x, places = inputs
    axis = attributes.get("axis", 0) % x.ndim
    if places.ndim == 0 and places.device.type == "cpu":
        return x.select(axis, int(places))
    return x[(slice(None),) * axis + (places.to(x.device).long(),)]


def _gather_elements(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x, places = together(inputs)
    return x.gather(attributes.get("axis", 0), places.long())


def _gather_nd(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    x, places = together(inputs)
    rank, shared = places.ndim - 1, attributes.get("batch_dims", 0)
    own = [
        torch.arange(x.shape[axis], device=x.device).view([-1 if a == axis else 1 for a in range(rank)])
        for axis in range(shared)
    ]
    return x[tuple(own) + places.long().unbind(-1)]


def _scatter_elements(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    """ScatterElements into the first input itself."""
    x, places, updates = together(inputs)
    axis, reduction = attributes.get("axis", 0), attributes.get("reduction", "none")
    if reduction == "none":
        return x.scatter_(axis, places, updates)
    return x.scatter_reduce_(axis, places, updates, REDUCTIONS[reduction])


def _scatter_nd(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    """ScatterND into the first input itself, which is contiguous if there is a reduction."""
    x, places, updates = together(inputs)
    if (reduction := attributes.get("reduction", "none")) == "none":
        return x.index_put_(places.unbind(-1), updates)
    strides = torch.tensor(x.stride()[: places.shape[-1]], device=x.device)
    flat = (places * strides).sum(-1)
    if flat.ndim != updates.ndim:
        raise ValueError(f"ScatterND with {reduction} of slices; expected one index per element")
    x.view(-1).scatter_reduce_(0, flat.reshape(-1), updates.reshape(-1), REDUCTIONS[reduction])
    return x


REDUCTIONS = {"max": "amax", "add": "sum"}
IN_PLACE = ("ScatterElements", "ScatterND")
"""Operations that write into their first input; whoever calls them copies it if others read it later."""


def _max_pool(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    (width,), pads = attributes["kernel_shape"], attributes["pads"]
    found: Tensor = functional.max_pool1d(inputs[0], width, stride=1, padding=pads[0])
    return found


def _rotary_embedding(inputs: Sequence[Tensor], attributes: Attributes) -> Tensor:
    """RotaryEmbedding of x [B,heads,n,D] to positions [B,n]; the halves of the last axis form the pairs."""
    x, cosine, sine, positions = together(inputs)
    cosine, sine = (table[positions].unsqueeze(1) for table in (cosine, sine))
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


OPERATIONS: Mapping[str, Operation] = {
    "Abs": _pointwise(torch.abs),
    "Add": _pointwise(torch.add),
    "And": _pointwise(torch.logical_and),
    "ArgMax": _place_of(torch.argmax),
    "ArgMin": _place_of(torch.argmin),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Ceil": _pointwise(torch.ceil),
    "Clip": _pointwise(torch.clamp),
    "Concat": _joined,
    "CumSum": _cumulated,
    "Div": _pointwise(_divide),
    "Equal": _pointwise(torch.eq),
    "Exp": _alike(torch.exp),
    "Expand": _expand,
    "Floor": _pointwise(torch.floor),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Greater": _pointwise(torch.gt),
    "GreaterOrEqual": _pointwise(torch.ge),
    "Identity": lambda inputs, attributes: inputs[0],
    "IsInf": _pointwise(torch.isinf),
    "IsNaN": _pointwise(torch.isnan),
    "Less": _pointwise(torch.lt),
    "LessOrEqual": _pointwise(torch.le),
    "Log": _pointwise(torch.log),
    "MatMul": _pointwise(torch.matmul),
    "Max": _folded(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _folded(torch.minimum),
    "Mod": _pointwise(torch.remainder),
    "Mul": _pointwise(torch.mul),
    "Neg": _pointwise(torch.neg),
    "Not": _pointwise(torch.logical_not),
    "Or": _pointwise(torch.logical_or),
    "Pad": _pad,
    "Reciprocal": _pointwise(torch.reciprocal),
    "ReduceL1": _length(1),
    "ReduceL2": _length(2),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceMin": _reduction(torch.amin),
    "ReduceSum": _reduction(_sum),
    "Reshape": _reshape,
    "RotaryEmbedding": _rotary_embedding,
    "Round": _pointwise(torch.round),
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Sqrt": _pointwise(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _pointwise(torch.sub),
    "Tanh": _alike(torch.tanh),
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _pointwise(torch.where),
}
"""The operations by ONNX's names."""
