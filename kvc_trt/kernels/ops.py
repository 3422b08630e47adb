"""`torch.ops.kvc`: the operators with kernels, as PyTorch operators. Importing this module registers them.

On CUDA tensors they call the CUDA library; on CPU tensors the emulated library if one was chosen (KVC_TRT_KERNELS,
`kvc_trt.kernels.use_library`), otherwise the reference. Result shapes depend only on shapes and numbers, so the
operators trace under `torch.compile` and replay in a CUDA graph. No operator has a gradient. An operator with an
optional output has a second form that does not write it: `hybrid_attention_without_selected`. Over caches in a format,
an operator is another one, with the parts of keys and values: `hybrid_attention_int8`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvc_trt.kernels import reference_ops, stored_ops
from kvc_trt.kernels.c_library import KernelLibraryError
from kvc_trt.kernels.library import KernelLibrary, empty_outputs
from kvc_trt.kernels.loading import VARIABLE, current_library
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS
from kvc_trt.models.cache_formats import CACHE_FORMATS, CacheFormat
from kvc_trt.operators.schema import CACHE_FORMAT, Operator

Result = Tensor | tuple[Tensor, ...] | None
"""None if an operator only updates state."""


def operator_name(operator: Operator) -> str:
    """Return the operator's name in `torch.ops.kvc`: "kvc_compact" becomes `compact`, in int8 `compact_int8`."""
    assert operator.kernel is not None
    name = operator.kernel.operation.removeprefix("kvc_")
    return name if operator.form is None else f"{name}_{operator.form.name}"


def argument_names(operator: Operator) -> tuple[str, ...]:
    """Return the names of the inputs, then of the attributes that the kernel takes; the format is in its name."""
    assert operator.kernel is not None
    left_out = {*operator.kernel.ignored, CACHE_FORMAT.name}
    numbers = (one.name for one in operator.attributes if one.name not in left_out)
    return (*(tensor.name for tensor in operator.inputs), *numbers)


def optional_outputs(operator: Operator) -> tuple[str, ...]:
    """Return the names of the outputs that a kernel may leave out."""
    return tuple(tensor.name for tensor in operator.outputs if tensor.optional)


def form_name(operator: Operator, without: Collection[str]) -> str:
    """Return the name in `torch.ops.kvc` of the form without these optional outputs."""
    return "_".join([operator_name(operator), *(f"without_{name}" for name in without)])


def schema(operator: Operator, without: Collection[str] = ()) -> str:
    """Return the operator's PyTorch schema; state is written in place and not returned."""
    state, tensors = operator.state, []
    for tensor in operator.inputs:
        alias = f"({chr(ord('a') + state.index(tensor))}!)" if tensor in state else ""
        tensors.append(f"Tensor{alias} {tensor.name}")
    numbers = [f"int {name}" for name in argument_names(operator)[len(tensors) :]]
    numbers += [f"Tensor? {tensor.name}=None" for tensor in operator.by_length]
    outputs = (tensor for tensor in operator.outputs if tensor.alias is None and tensor.name not in without)
    results = [f"Tensor {tensor.name}" for tensor in outputs]
    returned = "Tensor" if len(results) == 1 else f"({', '.join(results)})"
    return f"{form_name(operator, without)}({', '.join(tensors + numbers)}) -> {returned}"


def _implementation(operator: Operator, form: CacheFormat, without: Collection[str]) -> Callable[..., Result]:
    """Return the implementation, which calls a library's kernel or the reference."""
    own, kernel, computed = operator.in_format(form), operator.kernel, _by_reference(operator, form)
    assert kernel is not None
    names, numbers = _every_argument(own), _format_number(own)
    # These must not be copied; the others may be, to make them contiguous.
    not_copied = {tensor.name for tensor in own.state} | set(kernel.strided)

    def run(*arguments: Any) -> Result:
        given = _given(names, arguments)
        for tensor in own.inputs:
            if tensor.name not in not_copied:
                given[tensor.name] = given[tensor.name].contiguous()
        library = _library_for(arguments[0])
        if library is None:
            return _without(own, computed(given), without)
        return _result(tuple(library.compute(operator, {**given, **numbers}, without=without).values()))

    return run


def _by_reference(operator: Operator, form: CacheFormat) -> Callable[[Mapping[str, Any]], Result]:
    """Return the function from an operator's arguments by name to its result that the reference computes.

    It looks the reference up when it is called: an operator may have a kernel and no reference here."""
    name = operator_name(operator)

    def exact(given: Mapping[str, Any]) -> Result:
        result: Result = reference_ops.compute(name, given)
        return result

    def stored(given: Mapping[str, Any]) -> Result:
        result: Result = getattr(stored_ops, name)(form, given)
        return result

    return exact if operator.in_format(form) is operator else stored


def _format_number(operator: Operator) -> dict[str, int]:
    """Return the attribute that names an operator's format, which its name in `torch.ops.kvc` stands for."""
    return {} if operator.form is None else {CACHE_FORMAT.name: operator.form.code}


def _every_argument(operator: Operator) -> tuple[str, ...]:
    """Return the names of all arguments, the inputs by length last: callers whose rows are alike leave those out."""
    return (*argument_names(operator), *(tensor.name for tensor in operator.by_length))


def _given(names: Sequence[str], arguments: Sequence[Any]) -> dict[str, Any]:
    pairs = zip(names, arguments, strict=False)
    return {name: value for name, value in pairs if value is not None}


def _shapes(operator: Operator, without: Collection[str]) -> Callable[..., Result]:
    """Return the meta function: empty tensors in the shapes of the results."""
    names, numbers = _every_argument(operator), _format_number(operator)

    def made(*arguments: Any) -> Result:
        given = {**_given(names, arguments), **numbers}
        return _without(operator, _result(tuple(empty_outputs(operator, given).values())), without)

    return made


def _without(operator: Operator, made: Result, without: Collection[str]) -> Result:
    """Return the result without some of its outputs."""
    if not without or not isinstance(made, tuple):
        return made
    names = (tensor.name for tensor in operator.outputs if tensor.alias is None)
    return _result(tuple(value for name, value in zip(names, made, strict=True) if name not in without))


def _result(made: tuple[Tensor, ...]) -> Result:
    """Return an operator's new tensors in the form that PyTorch expects."""
    return made if len(made) > 1 else made[0] if made else None


def _library_for(value: Tensor) -> KernelLibrary | None:
    """Return the library for this tensor; None for the reference, which never replaces a missing CUDA library."""
    found = current_library()
    if found is not None and found.device_type == value.device.type:
        return found
    if value.device.type == "cpu":
        return None
    state = "there is none" if found is None else f"{found.path} is the {found.executor} one"
    raise KernelLibraryError(f"tensors on {value.device} need the CUDA kernel library; {state}", hint=f"set {VARIABLE}")


def _register() -> Any:
    """Define the operators and their implementations; they exist as long as the returned object."""
    torch_library: Any = torch.library  # PyTorch leaves these functions untyped
    library = torch_library.Library("kvc", "DEF")
    for operator, form, without in _forms():
        own = operator.in_format(form)
        name, implementation = form_name(own, without), _implementation(operator, form, without)
        library.define(schema(own, without), tags=(torch.Tag.needs_fixed_stride_order,))
        for device in ("CPU", "CUDA"):
            library.impl(name, implementation, device)
        torch_library.register_fake(f"kvc::{name}", _shapes(own, without), lib=library)
    return library


def _forms() -> Iterator[tuple[Operator, CacheFormat, tuple[str, ...]]]:
    """Yield each operator, the formats that change it, and the outputs that a form of it does not write."""
    for operator in LIBRARY_OPERATORS:
        for form in CACHE_FORMATS.values():
            if form.keys is None or operator.in_format(form) is not operator:
                for without in {(), optional_outputs(operator)}:
                    yield operator, form, without


_registered = _register()
kvc: Any = torch.ops.kvc
"""The registered operators."""


def numbers_of(operator: Operator, rule: object) -> dict[str, int]:
    """The attributes that an operator's kernel takes, by name, as `rule` (a policy's parameters) has them.

    They are the same in every format."""
    return {name: getattr(rule, name) for name in argument_names(operator)[len(operator.inputs) :]}


def operation(operator: Operator, form: CacheFormat, without: Collection[str] = ()) -> Any:
    """The registered operator over caches of a format, without some of its optional outputs."""
    return getattr(kvc, form_name(operator.in_format(form), without))


def call(operator: Operator, numbers: Mapping[str, int], **inputs: Tensor) -> tuple[Tensor, ...]:
    """All outputs of an operator in its order, state that was updated in place included.

    The operator may be that of a format (`Operator.in_format`). `inputs` may be those by length too."""
    made = getattr(kvc, operator_name(operator))(**inputs, **numbers)
    fresh = iter(made if isinstance(made, tuple) else () if made is None else (made,))
    return tuple(next(fresh) if one.alias is None else inputs[one.alias] for one in operator.outputs)
