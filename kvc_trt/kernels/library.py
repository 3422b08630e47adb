"""Call the kernels with torch tensors. They are checked first: to the C ABI a wrong shape is a wild read.

All checks but that of addresses depend on shapes, strides, types and numbers alone. Calls that agree in these are
checked once; later ones take the filled struct of the first and set addresses (`PreparedCall`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvc_trt.kernels.c_library import EXECUTORS, SCHEDULES, CLibrary
from kvc_trt.kernels.parameters import size_members
from kvc_trt.kernels.structs import Dtype, Parameters, struct_of
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.dimensions import Dimensions
from kvc_trt.operators.schema import BY_LENGTH, FLOAT, FLOAT16, INT8, INT32, INT64, Element, Kernel, Operator
from kvc_trt.operators.schema import Tensor as Schema

__all__ = ["DTYPES", "ELEMENTS", "EXECUTORS", "SCHEDULES", "CompactResult", "KernelLibrary", "empty_outputs"]

DTYPES = {torch.float32: Dtype.FLOAT32, torch.float16: Dtype.FLOAT16, torch.bfloat16: Dtype.BFLOAT16}
ELEMENTS: Mapping[Element, torch.dtype] = {
    INT64: torch.int64,
    INT32: torch.int32,
    INT8: torch.int8,
    FLOAT16: torch.float16,
    FLOAT: torch.float32,
}
"""Types of the tensors that do not have the cache's type."""


class CompactResult(NamedTuple):
    """The outputs of KvcCompact: the part of a prompt's cache that is kept."""

    k_cache: Tensor
    v_cache: Tensor
    bounds: Tensor
    cache_lengths: Tensor
    indices: Tensor


@dataclass(frozen=True)
class PreparedCall:
    """A call that was checked, for calls of the same operator that differ from it in addresses alone."""

    operator: Operator
    """Kept, since signatures name it by its address."""
    operation: str
    struct: type[Parameters]
    filled: bytes
    """The struct with its numbers; addresses are 0."""
    outputs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """The outputs that the call makes: name, shape, type."""
    extents: tuple[tuple[str, int, bool], ...]
    """Each input's name, the bytes from its first to its last, and if the call writes it."""
    workspace_bytes: int


MOST_PREPARED = 1024
"""Calls that a library keeps prepared: an engine has a few for each number of rows, prompts one for each length."""


class KernelLibrary(CLibrary):
    """A kernel library that is called with torch tensors."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        self._prepared: dict[Any, PreparedCall] = {}

    def compact(self, *tensors: Tensor, out: CompactResult | None = None, **arguments: Tensor | int) -> CompactResult:
        """Run KvcCompact (see `compute`); `out` receives the results in the caller's tensors.

        Passing k and v as out.k_cache and out.v_cache compacts the cache in place (capacity = S, both contiguous).
        """
        given = None if out is None else out._asdict()
        return CompactResult(**self.compute(COMPACT, _named(COMPACT, tensors, arguments), out=given))

    def hybrid_attention(
        self, *tensors: Tensor, with_selected: bool = True, **arguments: Tensor | int
    ) -> tuple[Tensor, Tensor | None]:
        """Run KvcHybridAttention; return output and selected. A row whose length is outside 0..C-1 is inactive."""
        without = () if with_selected else ("selected",)
        made = self.compute(HYBRID_ATTENTION, _named(HYBRID_ATTENTION, tensors, arguments), without=without)
        return made["output"], made.get("selected")

    def dense_attention(self, *tensors: Tensor, **arguments: Tensor | int) -> Tensor:
        """Run KvcDenseAttention and return its output."""
        return self.compute(DENSE_ATTENTION, _named(DENSE_ATTENTION, tensors, arguments))["output"]

    def compute(
        self,
        operator: Operator,
        arguments: Mapping[str, Tensor | int],
        *,
        out: Mapping[str, Tensor] | None = None,
        without: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Run an operator and return its outputs, except those in `without` and those updated in place.

        `arguments` are its inputs and attributes by name, those by length where rows have numbers of their own; with an
        attribute `cache_format` the tensors are those of `operator.in_format`. `out` are tensors that receive outputs.
        Raises ValueError for a tensor or number that does not fit, KernelError if the library refuses the call.
        """
        signature = None if out is not None else _signature(operator, arguments, without)
        prepared = None if signature is None else self._prepared.get(signature)
        if prepared is not None:
            return self._repeat(prepared, arguments)
        if operator.by_length and operator.by_length[0].name in arguments:
            arguments = {**arguments, BY_LENGTH.name: 1}
        assert operator.kernel is not None
        kernel = operator.kernel
        inputs, numbers = _split(arguments)
        own = operator.for_numbers(numbers)
        first = inputs[own.inputs[0].name]
        self._check_device(first)
        cache = _cache_type(own, first, numbers)
        sizes = _bound(own, inputs, numbers, cache)
        outputs = {} if out is None else dict(out)
        for tensor in own.outputs:
            if tensor.alias is not None:
                continue
            shape, dtype = sizes.shape(tensor.shape), dtype_of(own, tensor, numbers, cache)
            if out is not None:
                _check_like(tensor.name, outputs[tensor.name], shape, dtype, first.device)
            elif tensor.name not in without:
                outputs[tensor.name] = torch.empty(shape, dtype=dtype, device=first.device)
        _check_separate(own, kernel, inputs, outputs)
        fields = _numbers(operator, sizes, numbers) | {"dtype": int(DTYPES[cache])}
        for stride in kernel.strides:
            fields[stride.name] = inputs[kernel.strided[0]].stride(stride.axis)
        addresses = {name: value.data_ptr() for name, value in (inputs | outputs).items()}
        params = struct_of(operator)(**fields, **addresses)
        workspace_bytes = self.workspace_bytes(kernel.operation, params)
        self._launch(kernel.operation, params, workspace_bytes, first.device)
        if signature is not None:
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            written = {tensor.name for tensor in own.state}
            self._prepared[signature] = PreparedCall(
                operator, kernel.operation, struct_of(operator), bytes(struct_of(operator)(**fields)),
                tuple((name, tuple(value.shape), value.dtype) for name, value in outputs.items()),
                tuple((name, _extent(value), name in written) for name, value in inputs.items()),
                workspace_bytes,
            )  # fmt: skip
        return outputs

    def _repeat(self, prepared: PreparedCall, arguments: Mapping[str, Tensor | int]) -> dict[str, Tensor]:
        """Make a call like one that was checked: only addresses can be wrong, where tensors share memory."""
        params, spans = prepared.struct.from_buffer_copy(prepared.filled), []
        device = torch.device("cpu")
        for name, extent, written in prepared.extents:
            value = arguments[name]
            assert isinstance(value, Tensor)
            address, device = value.data_ptr(), value.device
            setattr(params, name, address)
            spans.append((address, address + extent, written, name))
        _check_spans(spans)
        outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in prepared.outputs}
        for name, made in outputs.items():
            setattr(params, name, made.data_ptr())
        self._launch(prepared.operation, params, prepared.workspace_bytes, device)
        return outputs

    def run(self, operation: str, params: Parameters, device: torch.device) -> None:
        """Call with a workspace from torch on the device's current stream. The struct's pointers are not checked."""
        self._launch(operation, params, self.workspace_bytes(operation, params), device)

    def _launch(self, operation: str, params: Parameters, workspace_bytes: int, device: torch.device) -> None:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        with _current(device) as stream:
            self.call(operation, params, workspace.data_ptr(), workspace_bytes, stream)

    def _check_device(self, value: Tensor) -> None:
        if value.device.type != self.device_type:
            raise ValueError(f"tensors are on {value.device}; {self.path} ({self.executor}) takes {self.device_type}")


def empty_outputs(operator: Operator, arguments: Mapping[str, Tensor | int]) -> dict[str, Tensor]:
    """Return tensors for the outputs that are not updated in place, on the device of the inputs. Nothing is checked."""
    inputs, numbers = _split(arguments)
    first = inputs[operator.inputs[0].name]
    shapes = operator.output_shapes(
        {name: value.shape for name, value in inputs.items()}, numbers, first.element_size()
    )
    return {
        tensor.name: first.new_empty(shapes[tensor.name], dtype=dtype_of(operator, tensor, numbers, first.dtype))
        for tensor in operator.outputs
        if tensor.alias is None
    }


def dtype_of(operator: Operator, tensor: Schema, numbers: Mapping[str, int], cache: torch.dtype) -> torch.dtype:
    """Return the type of one of an operator's tensors, given its attributes and the type of the cache."""
    return ELEMENTS.get(operator.element_of(tensor, numbers), cache)


def _named(
    operator: Operator, tensors: tuple[Tensor, ...], arguments: Mapping[str, Tensor | int]
) -> dict[str, Tensor | int]:
    """Return the arguments by name; `tensors` are the first inputs in the operator's order."""
    return dict(zip((tensor.name for tensor in operator.inputs), tensors, strict=False)) | dict(arguments)


def _split(arguments: Mapping[str, Tensor | int]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Split arguments into tensors and numbers."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}


def _cache_type(operator: Operator, first: Tensor, numbers: Mapping[str, int]) -> torch.dtype:
    """Return the type of the cache: that of the first input; ValueError unless it is one that a cache can have.

    Bounds in fp8 do not tell it, and an operator of them alone does not look at it.
    """
    if operator.element_of(operator.inputs[0], numbers) == INT8:
        return torch.float32
    if first.dtype not in DTYPES:
        name = operator.inputs[0].name
        raise ValueError(f"{name} is {first.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    return first.dtype


def _bound(
    operator: Operator, inputs: Mapping[str, Tensor], numbers: Mapping[str, int], cache: torch.dtype
) -> Dimensions:
    """Return all sizes of a call; ValueError for inputs and attributes that do not fit together."""
    kernel, first = operator.kernel, inputs[operator.inputs[0].name]
    sizes = Dimensions(cache.itemsize)
    for tensor in operator.inputs:
        value = inputs[tensor.name]
        if value.numel() == 0:
            raise ValueError(f"{tensor.name} has shape {list(value.shape)}; expected no empty dimension")
        sizes.bind(tensor.name, tensor.shape, value.shape)
        dtype = dtype_of(operator, tensor, numbers, cache)
        if kernel is None or tensor.name not in kernel.strided:
            _check_like(tensor.name, value, tuple(value.shape), dtype, first.device)
            continue
        _check_memory(tensor.name, value, dtype, first.device)
        if value.stride() != inputs[kernel.strided[0]].stride() or value.stride(-1) != 1:
            found = f"strides {[list(inputs[name].stride()) for name in kernel.strided]}"
            raise ValueError(f"{' and '.join(kernel.strided)} have {found}; expected equal ones, heads contiguous")
    for attribute in operator.attributes:
        if kernel is not None and attribute.name in kernel.ignored:
            continue
        value_of = numbers[attribute.name]
        if not attribute.least <= value_of <= attribute.most:  # ctypes would truncate a larger one silently
            raise ValueError(f"{attribute.name} is {value_of}; expected it in {attribute.least}..{attribute.most}")
    operator.derive(numbers, sizes)
    return sizes


def _numbers(operator: Operator, sizes: Dimensions, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of the struct: sizes and attributes."""
    ignored = () if operator.kernel is None else operator.kernel.ignored
    attributes = {name: value for name, value in numbers.items() if name not in ignored}
    return attributes | {member: sizes[symbol] for symbol, member in size_members(operator).items()}


def _check_like(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `value` is a contiguous tensor of exactly this shape, type and device."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {list(shape)}")
    _check_memory(name, value, dtype, device)
    if not value.is_contiguous():
        raise ValueError(f"{name} {list(value.shape)} has strides {list(value.stride())}; expected it contiguous")


def _check_memory(name: str, value: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `value` is an ordinary tensor of this type on `device`."""
    if value.dtype != dtype:
        raise ValueError(f"{name} {list(value.shape)} is {value.dtype}; expected {dtype}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; expected {device}")
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        raise ValueError(f"{name} is not an ordinary strided tensor")


def _check_separate(
    operator: Operator, kernel: Kernel, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> None:
    """Raise ValueError if an output shares memory with another tensor."""
    read = dict(inputs)
    pairs = [(outputs[output], inputs[source]) for output, source in kernel.in_place.items()]
    if pairs and all(output.data_ptr() == source.data_ptr() for output, source in pairs):
        read = {name: value for name, value in inputs.items() if name not in kernel.in_place.values()}
    written = [*outputs, *(tensor.name for tensor in operator.state)]
    spans = {name: _span(value) for name, value in (read | dict(outputs)).items()}
    for name in written:
        for other, (start, end) in spans.items():
            if other != name and spans[name][0] < end and start < spans[name][1]:
                raise ValueError(f"{name} and {other} overlap in memory; expected separate tensors")


def _check_spans(spans: list[tuple[int, int, bool, str]]) -> None:
    """Raise ValueError if a span (first byte, byte after the last, written, name) that is written overlaps another.

    In the order of addresses, a span overlaps one before it if it begins before the furthest end so far.
    """
    ends = {False: (0, ""), True: (0, "")}
    for first, end, written, name in sorted(spans):
        for other_written, (other_end, other) in ends.items():
            if first < other_end and (written or other_written):
                raise ValueError(f"{other} and {name} overlap in memory; expected separate tensors")
        ends[written] = max(ends[written], (end, name))


def _signature(operator: Operator, arguments: Mapping[str, Tensor | int], without: Collection[str]) -> Any:
    """Return everything on which the checks of a call depend but addresses, to be compared; None to check anew."""
    parts: list[Any] = [id(operator), *sorted(without)]
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_neg():
                return None
            parts += (name, value.shape, value.stride(), value.dtype, value.device)
        else:
            parts += (name, value)
    return tuple(parts)


def _span(value: Tensor) -> tuple[int, int]:
    """Return the address of the first byte and the address after the last."""
    return value.data_ptr(), value.data_ptr() + _extent(value)


def _extent(value: Tensor) -> int:
    """Return the bytes from a tensor's first to its last."""
    steps = zip(value.shape, value.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * value.element_size()


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[int | None]:
    """Make `device` current and yield its stream; None for the emulation."""
    if device.type != "cuda":
        yield None
        return
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream
