"""The definition of an operator: names, types, shapes and ranges, and the function that writes its ONNX body.

    HYBRID_ATTENTION = Operator(
        name="KvcHybridAttention", inputs=(Tensor("query", CACHE, ("B", "H", "D")), ...), write=_write, ...
    )
    HYBRID_ATTENTION.call(emit, {"query": query, ...}, {"output": "attended", ...}, page_size=16, ...)

Everything that calls, binds or checks an operator derives from this object: the call in a graph, the structs of the C
ABI, `torch.ops`, the TensorRT plugins. Importing this module imports neither onnx nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

from kvc_trt.models.cache_formats import CACHE_FORMATS, format_of_code
from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.dimensions import (
    COMMON_FORMULAS,
    ELEMENT_BYTES,
    INT32_MAX,
    Dimensions,
    Refusal,
    evaluate,
    names_in,
)
from kvc_trt.operators.softmax import CAPPED, SINK_LOGITS, WITH_SINKS

if TYPE_CHECKING:
    from onnx import FunctionProto

    from kvc_trt.models.cache_formats import CacheFormat, VectorFormat
    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.operators.shapes import Layout

VERSION = "1"
PLUGIN_ATTRIBUTES = {"plugin_namespace": KVC_DOMAIN, "plugin_version": VERSION}
"""Attributes of a call that make a TensorRT build replace it by a plugin."""

Element = Literal["CACHE", "BOUND", "FLOAT", "FLOAT16", "INT64", "INT32", "INT8", "UINT8"]
CACHE: Element = "CACHE"
"""The element type of the cache: float32, float16 or bfloat16, the same for all tensors of a call."""
BOUND: Element = "BOUND"
"""The element type of page bounds: INT8 where the attribute fp8_bounds is 1 (`fp8_bounds.py`), else the cache's."""
FLOAT: Element = "FLOAT"
FLOAT16: Element = "FLOAT16"
INT64: Element = "INT64"
INT32: Element = "INT32"
INT8: Element = "INT8"
UINT8: Element = "UINT8"


@dataclass(frozen=True)
class Attribute:
    """A required INT attribute; both ends of its range are allowed."""

    name: str
    least: int = 1
    most: int = INT32_MAX
    summary: str = ""
    bits: int = 64
    """Width of its field in the C ABI. In ONNX it is an INT, in TensorRT an INT32."""
    odd: bool = False
    at_most: str | None = None
    """The name of another attribute or size that it may not exceed."""


_LAST_FORMAT = max(form.code for form in CACHE_FORMATS.values())
CACHE_FORMAT = Attribute("cache_format", 0, _LAST_FORMAT, "how keys and values are stored", bits=32)
BY_LENGTH = Attribute("by_length", 0, 1, "1: each row has its own prompt_budgets and pool_kernels", bits=32)
SOFTMAX = Attribute("softmax", 0, CAPPED | WITH_SINKS, "1: logits are capped, 2: sinks in the denominator", bits=32)
OF_SOME_CALLS = (CACHE_FORMAT, BY_LENGTH, SOFTMAX)
"""Attributes that only some calls have; without them they are 0."""


@dataclass(frozen=True)
class Tensor:
    """One input or output of an operator."""

    name: str
    element: Element
    shape: tuple[str, ...]
    """Symbols of `dimensions.SIZES`, or the operator's own."""
    summary: str = ""
    alias: str | None = None
    """For an output: the input whose buffer it shares. That input is state that a decode step updates in place."""
    fill: float | Literal["lowest"] = 0.0
    """For state: the value of an empty slot or page."""
    optional: bool = False
    """True if a kernel may omit this output (a null pointer)."""
    stored: Literal["keys", "values", "channels"] | None = None
    """The vectors of a cache: in a format these are codes, and the operator has their scales and minima too. Channels
    of keys are codes alone, never packed: their scales are those of the keys."""
    parts_as: str | None = None
    """The beginning of the names of its scales and minima; None: its own name without "_cache"."""


@dataclass(frozen=True)
class Stride:
    """A number of the C ABI that describes the memory layout of inputs."""

    name: str
    axis: int
    """Axis of the inputs that `Kernel.strided` names."""
    contiguous: tuple[str, ...]
    """Symbols whose product the stride is when these inputs are contiguous."""
    summary: str


@dataclass(frozen=True)
class Kernel:
    """The operation of the C ABI that computes an operator; its workspace is `<operation>_workspace`."""

    operation: str
    struct: str
    """The name of the operation's parameter struct."""
    ignored: tuple[str, ...] = ()
    """Attributes that only the ONNX body reads."""
    later: tuple[str, ...] = ()
    """Attributes that came after a struct's other 32-bit numbers were settled, and stand behind them."""
    strided: tuple[str, ...] = ()
    """Inputs that share strides and need not be contiguous; the elements of a head are contiguous."""
    strides: tuple[Stride, ...] = ()
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Output -> input whose memory it may share; either all of these outputs do or none."""


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator of the domain `kvc`: its schema and its body."""

    name: str
    summary: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    write: Callable[[Emitter, Layout], Mapping[str, Value]] | None
    """Writes the body with an emitter. Each input is the value of its name; the result maps outputs to values. None:
    the operator is one of the kernel libraries alone, and no graph has it."""
    attributes: tuple[Attribute, ...] = ()
    formulas: Mapping[str, str] = field(default_factory=dict)
    """Formula of each output size that is derived from attributes and other sizes, by symbol."""
    kernel: Kernel | None = None
    native: bool = True
    """True if plugins_cpu may implement it; otherwise it is no part of that library's interface.
    A turn's operators are not: their time goes into matrix products, which ONNX Runtime computes as fast."""
    by_length: tuple[Tensor, ...] = ()
    """The inputs that it has only where its attribute of that name is 1: numbers of each row by its own length."""
    attends: bool = False
    """True if it computes a softmax of queries and keys that calls may give a cap and sinks (`softmax.py`)."""
    stores: bool = False
    """True if it stores or reads vectors of a cache, so that its results depend on the cache's format."""
    form: CacheFormat | None = None
    """The format of the caches that it is over; None: they hold vectors as they are."""
    exact: Operator | None = None
    """The operator over caches that hold vectors as they are, if this one is over a format."""

    def in_format(self, form: CacheFormat) -> Operator:
        """Return the operator over caches of a format; itself if that is `auto` or its own, or if none changes it."""
        return self if not self.stores or form.keys is None or form == self.form else _in_format(self, form)

    def with_lengths(self) -> Operator:
        """Return the operator whose rows have numbers of their own; itself if it has no such inputs."""
        return self._with_lengths if self.by_length else self

    @cached_property
    def _with_lengths(self) -> Operator:
        inputs = (*self.inputs, *self.by_length)
        return replace(self, inputs=inputs, attributes=(*self.attributes, BY_LENGTH), by_length=())

    @cached_property
    def whole(self) -> Operator:
        """The operator with the inputs that only some calls have, which are optional."""
        some = tuple(replace(tensor, optional=True) for tensor in self.by_length)
        return replace(self, by_length=some).with_lengths() if some else self

    def with_softmax(self, code: int) -> Operator:
        """Return the operator with a softmax of that attribute, which no kernel has; itself for the plain softmax."""
        return _with_softmax(self, code) if code and self.attends else self

    def for_numbers(self, numbers: Mapping[str, int]) -> Operator:
        """Return the operator in the form that a call's attributes name: cache format, numbers by length, softmax."""
        own = self.in_format(format_of_code(numbers.get(CACHE_FORMAT.name, 0)))
        own = own.with_lengths() if numbers.get(BY_LENGTH.name) else own
        return own.with_softmax(numbers.get(SOFTMAX.name, 0))

    @cached_property
    def call_attributes(self) -> tuple[Attribute, ...]:
        """The attributes of the calls that kernels may serve, those of some calls last."""
        some = ((CACHE_FORMAT, self.stores and self.form is None), (BY_LENGTH, bool(self.by_length)))
        return (*self.attributes, *(attribute for attribute, has in some if has))

    @cached_property
    def state(self) -> tuple[Tensor, ...]:
        """The inputs that are updated in place."""
        aliased = {tensor.alias for tensor in self.outputs}
        return tuple(tensor for tensor in self.inputs if tensor.name in aliased)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All inputs, then all outputs."""
        return self.inputs + self.outputs

    def body(self, layout: Layout) -> FunctionProto:
        """Return the operator as an ONNX function of standard operators, for one engine; ValueError if it has none."""
        from kvc_trt.operators.emitter import Emitter, make_function

        if self.write is None:
            raise ValueError(f"{self.name} has no body: it is an operator of the kernel libraries alone")
        emit, own = Emitter(), self.in_format(layout.cache_format)
        own = own.with_lengths() if layout.by_length else own
        own = own.with_softmax(layout.softmax.code)
        written = self.write(emit, layout)
        own._check_names("outputs", written, own.outputs)
        outputs = {name: written[name] for name in _names(own.outputs)}
        return make_function(
            KVC_DOMAIN, self.name, _names(own.inputs), outputs, _names(own.attributes), emit, opset=OPSET
        )

    def call(
        self,
        emit: Emitter,
        inputs: Mapping[str, Value],
        outputs: Mapping[str, str] | None = None,
        **attributes: int,
    ) -> dict[str, Value]:
        """Append a node of this operator and return the value of every output.

        `outputs` names all of the values; without it they get generated names. Raises ValueError unless exactly the
        operator's inputs, outputs and attributes are given.
        """
        own = self.for_numbers(attributes)
        own._check_names("inputs", inputs, own.inputs)
        own._check_names("attributes", attributes, own.attributes)
        names = _names(own.outputs)
        if outputs is not None:
            own._check_names("outputs", outputs, own.outputs)
        made = emit.call(
            self.name,
            *(inputs[name] for name in _names(own.inputs)),
            outputs=len(names) if outputs is None else [outputs[name] for name in names],
            domain=KVC_DOMAIN,
            **{name: attributes[name] for name in _names(own.attributes)},
            **PLUGIN_ATTRIBUTES,
        )
        return dict(zip(names, (made,) if isinstance(made, str) else made, strict=True))

    def element_of(self, tensor: Tensor, values: Mapping[str, int]) -> Element:
        """Return the element type of one of the operator's tensors, given the attributes: never BOUND."""
        if tensor.element != BOUND:
            return tensor.element
        return INT8 if values["fp8_bounds"] else CACHE

    def check(self, values: Mapping[str, int]) -> None:
        """Raise Refusal for attributes of a call that are out of range or do not fit together."""
        values = dict.fromkeys(_names(OF_SOME_CALLS), 0) | dict(values)
        for attribute in self.call_attributes:
            name, value = attribute.name, values[attribute.name]
            if not attribute.least <= value <= attribute.most:
                raise Refusal(f"field {name}: expected {attribute.least}..{attribute.most}, found {value}")
        for attribute in self.call_attributes:
            name, value = attribute.name, values[attribute.name]
            if attribute.odd and value % 2 == 0:
                raise Refusal(f"field {name}: expected an odd number, found {value}")
            limit = values.get(attribute.at_most) if attribute.at_most else None
            if limit is not None and value > limit:
                raise Refusal(f"field {name}: expected at most the {attribute.at_most} of {limit}, found {value}")

    def derive(self, values: Mapping[str, int], sizes: Dimensions) -> None:
        """Add the sizes that can be derived from attributes and from sizes known so far."""
        if "D/2" in sizes and "D" not in sizes:  # codes of 4 bits alone tell the head size
            sizes.fix("D", 2 * sizes["D/2"], self._origin("D/2", ()))
        for symbol, formula in self.all_formulas():
            names = names_in(formula)
            if all(name in values or name in sizes for name in names):
                known = {name: values[name] if name in values else sizes[name] for name in names}
                sizes.fix(symbol, evaluate(formula, known), self.origin_of(symbol))

    def output_shapes(
        self, inputs: Mapping[str, Sequence[int]], values: Mapping[str, int], element_bytes: int
    ) -> dict[str, list[int]]:
        """Return the shape of every output, given the shapes of all inputs, the attributes and the size of the cache's
        elements in bytes. Nothing is checked."""
        known = {**values, ELEMENT_BYTES: element_bytes}
        for tensor in self.inputs:
            known |= zip(tensor.shape, inputs[tensor.name], strict=True)
        if "D/2" in known:
            known.setdefault("D", 2 * known["D/2"])
        for symbol, formula in self.all_formulas():
            known[symbol] = evaluate(formula, known)
        return {tensor.name: [known[symbol] for symbol in tensor.shape] for tensor in self.outputs}

    def all_formulas(self) -> tuple[tuple[str, str], ...]:
        """Return symbol and formula of every derived size: the operator's own, then the common ones.

        A common formula over a size that none of the operator's tensors has does not hold: that size is its own."""
        return self._all_formulas

    def origin_of(self, symbol: str) -> str:
        """Return where a derived size comes from, for messages: attributes, or the first tensor that has it."""
        return self._origins[symbol]

    @cached_property
    def _all_formulas(self) -> tuple[tuple[str, str], ...]:
        named = {symbol for tensor in self.tensors for symbol in tensor.shape}
        named |= {"D"} if "D/2" in named else set()
        known = named | {*_names(self.attributes), ELEMENT_BYTES}
        common = (one for one in COMMON_FORMULAS.items() if one[0] in named and known.issuperset(names_in(one[1])))
        return (*self.formulas.items(), *common)

    @cached_property
    def _origins(self) -> Mapping[str, str]:
        return {symbol: self._origin(symbol, names_in(formula)) for symbol, formula in self.all_formulas()}

    def _origin(self, symbol: str, names: tuple[str, ...]) -> str:
        fields = [attribute.name for attribute in self.attributes if attribute.name in names]
        if fields:
            return f"field{'s' if len(fields) > 1 else ''} {', '.join(fields)}"
        return next(tensor.name for tensor in self.tensors if symbol in tensor.shape)

    def _check_names(
        self, kind: str, found: Mapping[str, object], expected: tuple[Tensor, ...] | tuple[Attribute, ...]
    ) -> None:
        if set(found) != set(_names(expected)):
            raise ValueError(f"{self.name}: expected {kind} {', '.join(_names(expected))}, found {', '.join(found)}")


@cache
def _with_softmax(operator: Operator, code: int) -> Operator:
    sinks = (Tensor(SINK_LOGITS, CACHE, ("H",), "in the denominator of each query head"),) if code & WITH_SINKS else ()
    return replace(
        operator, inputs=(*operator.inputs, *sinks), attributes=(*operator.attributes, SOFTMAX), attends=False,
        kernel=None, native=False,
    )  # fmt: skip


@cache
def _in_format(operator: Operator, form: CacheFormat) -> Operator:
    inputs, outputs = (
        tuple(part for tensor in side for part in parts_of(tensor, form))
        for side in (operator.inputs, operator.outputs)
    )
    attributes = (*operator.attributes, CACHE_FORMAT)
    return replace(operator, inputs=inputs, outputs=outputs, attributes=attributes, form=form, exact=operator)


def parts_of(tensor: Tensor, form: CacheFormat) -> tuple[Tensor, ...]:
    """Return the tensors of an operator that hold one of its tensors in a format: itself, or codes and numbers."""
    vector = vector_of(tensor, form)
    if tensor.stored is None or vector is None:
        return (tensor,)
    if tensor.stored == "channels":
        return (replace(tensor, element=INT8),)
    names = part_names(tensor, vector)
    aliases = [None if tensor.alias is None else name.removesuffix("_out") for name in names]
    codes, groups = "D" if vector.code_bits == 8 else "D/2", "groups" if vector.grouped else "1"
    kinds = [(INT8, codes), (INT8 if vector.scale_bytes == 1 else FLOAT16, groups), (FLOAT16, groups)]
    return tuple(
        replace(tensor, name=name, element=element, alias=alias, shape=(*tensor.shape[:-1], last))
        for name, alias, (element, last) in zip(names, aliases, kinds[: len(names)], strict=True)
    )


def vector_of(tensor: Tensor, form: CacheFormat) -> VectorFormat | None:
    """Return how the vectors of an operator's tensor are stored; None: as they are."""
    return form.values if tensor.stored == "values" else form.keys


def part_names(tensor: Tensor, vector: VectorFormat | None) -> list[str]:
    """Return the names of a tensor's codes, scales, and minima where the format has them; None: its own name."""
    if vector is None:
        return [tensor.name]
    before, after = tensor.name.removesuffix("_out"), "_out" * tensor.name.endswith("_out")
    own = tensor.parts_as or before.removesuffix("_cache")
    return [tensor.name, f"{own}_scale{after}", *([f"{own}_minimum{after}"] if vector.grouped else [])]


def _names(parts: tuple[Tensor, ...] | tuple[Attribute, ...]) -> list[str]:
    return [part.name for part in parts]
