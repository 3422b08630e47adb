"""Run ONNX nodes in PyTorch, node by node: those of a layer's caches, and the bodies of the operators that they call.

The body of an operator is its executable specification, so what it computes is written once, for every executor. Nodes
without a use are left out, and a value is freed after its last one. State is updated in place where its operator
scatters into it; other results are new tensors, which the caller copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from onnx import AttributeProto, helper, numpy_helper
from torch import Tensor

from kvc_trt.backends.torch.device import from_numpy
from kvc_trt.backends.torch.nodes.standard_operations import IN_PLACE, OPERATIONS, Attributes
from kvc_trt.backends.torch.whole_prompts import store_whole
from kvc_trt.graph.rewrites.prune import read_names
from kvc_trt.kernels.ops import argument_names
from kvc_trt.kernels.ops import call as call_kernel
from kvc_trt.methods.base.registry import operators
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.schema import BY_LENGTH
from kvc_trt.operators.tensors import CAPACITY

if TYPE_CHECKING:
    from onnx import NodeProto

    from kvc_trt.operators.schema import Operator
    from kvc_trt.operators.shapes import Layout

Tensors = Mapping[str, Tensor]
"""Tensors by name."""


class Scope(dict[str, Tensor]):
    """Values by name; those of the graph around it are visible."""

    def __init__(self, values: Tensors, outer: Scope | None = None) -> None:
        super().__init__(values)
        self._outer = outer

    def __missing__(self, name: str) -> Tensor:
        if self._outer is None:
            raise KeyError(name)
        return self._outer[name]


Run = Callable[[Scope], Sequence[Tensor]]


@dataclass(frozen=True)
class _Step:
    run: Run
    outputs: Sequence[str]
    freed: Sequence[str]
    """Values that no later node reads."""


@dataclass
class Operators:
    """Compiles calls of our operators for one engine and device; equal calls share the compiled function."""

    layout: Layout
    device: torch.device
    kernels: bool = True
    """True if an operator with a kernel calls it, and KvcStoreTokens that of KvcAppendBlock; otherwise bodies run."""
    _bodies: dict[Any, NodeProgram] = field(default_factory=dict)

    def call(self, node: NodeProto, wanted: Collection[str]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """Return a function from the inputs of a node to its outputs; those without a name in `wanted` may be empty."""
        numbers = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        operator = operators()[node.op_type].for_numbers(numbers)
        if self.kernels and operator.kernel is not None:
            return self._kernel(operator, numbers)
        if self.kernels and operator.name == STORE_TOKENS.name:
            return self._store(numbers[CAPACITY.name])
        return self._body(operator, numbers, [name in wanted for name in node.output])

    def _store(self, capacity: int) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            keys, values, lengths = inputs
            return store_whole(keys, values, lengths, capacity, self.layout.cache_format)

        return run

    def _kernel(self, operator: Operator, numbers: Mapping[str, int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        names = [tensor.name for tensor in operator.inputs]
        taken = {name: numbers[name] for name in argument_names(operator)[len(names) :] if name != BY_LENGTH.name}

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            given = {name: value.to(self.device) for name, value in zip(names, inputs, strict=True)}
            return call_kernel(operator, taken, **given)

        return run

    def _body(
        self, operator: Operator, numbers: Mapping[str, Any], wanted: Sequence[bool]
    ) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        attributes = {one.name: numbers[one.name] for one in operator.attributes}
        key = operator.name, *attributes.items(), *wanted
        if key not in self._bodies:
            function = operator.body(self.layout)
            outputs = [name for name, used in zip(function.output, wanted, strict=True) if used]
            state = [tensor.name for tensor in operator.state]
            self._bodies[key] = NodeProgram(function.node, outputs, self, attributes=attributes, state=state)
        body, names, nothing = self._bodies[key], [tensor.name for tensor in operator.inputs], torch.empty(0)

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            found = iter(body.run(Scope(dict(zip(names, inputs, strict=True)))))
            return [next(found) if used else nothing for used in wanted]

        return run


class NodeProgram:
    """Nodes in the order in which they run.

    `outputs` are the values that `run` returns; `attributes` those of the function whose body the nodes are; `state`
    the inputs that may be written. `reads` are the values that come from outside, `exposed` those of the outputs that
    are only to be seen.
    """

    def __init__(
        self, nodes: Sequence[NodeProto], outputs: Sequence[str], operators: Operators, *,
        attributes: Mapping[str, int] | None = None, state: Collection[str] = (), exposed: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.exposed = exposed
        self._outputs, self._operators = tuple(outputs), operators
        self._attributes, self._state = attributes or {}, frozenset(state)
        self._wanted = set(outputs)
        """The values read by the nodes compiled so far; they are compiled from the last to the first."""
        self._used = set(outputs)
        """The values in `_wanted` without those that only Shape nodes read, which depend on no element."""
        self._steps: list[_Step] = []
        for node in reversed(nodes):
            if self._wanted.intersection(node.output):
                self._steps.insert(0, self._step(node))
        produced = {name for step in self._steps for name in step.outputs}
        self.reads = frozenset(self._wanted - produced)

    def run(self, scope: Scope) -> list[Tensor]:
        """Run the nodes on the values of a scope, which is used up, and return the outputs."""
        for step in self._steps:
            scope.update(zip(step.outputs, step.run(scope), strict=True))
            for name in step.freed:
                scope.pop(name, None)
        return [scope[name] for name in self._outputs]

    def _step(self, node: NodeProto) -> _Step:
        read = read_names([node]) - {""}
        step = _Step(self._compiled(node), tuple(node.output), tuple((read | set(node.output)) - self._wanted))
        self._wanted |= read
        self._used |= read if node.op_type != "Shape" else set()
        return step

    def _compiled(self, node: NodeProto) -> Run:
        if node.op_type == "If":
            return self._choice(node)
        if node.op_type == "Loop":
            return self._loop(node)
        inputs, attributes = [name for name in node.input if name], self._attributes_of(node)
        if node.op_type == "Constant":
            constant = [_constant(*attributes.values())]
            return lambda scope: constant
        if node.domain == KVC_DOMAIN:
            called = self._operators.call(node, self._wanted)
            return lambda scope: called([scope[name] for name in inputs])
        if node.op_type == "Range":
            return lambda scope: [self._range(*(int(scope[name]) for name in inputs))]
        return self._standard(node, inputs, attributes)

    def _standard(self, node: NodeProto, inputs: Sequence[str], attributes: Attributes) -> Run:
        if any(not name for name in node.input[: len(inputs)]):
            raise ValueError(f"{node.op_type} leaves out an input before others; expected all of them up to the last")
        operation, later = OPERATIONS[node.op_type], frozenset(self._used)
        writes = node.op_type in IN_PLACE
        copied = writes and (inputs[0] not in self._state or inputs[0] in later)

        def run(scope: Scope) -> Sequence[Tensor]:
            given = [scope[name] for name in inputs]
            if copied or (writes and _is_shared(given[0], (scope[name] for name in later if name in scope))):
                given[0] = given[0].clone(memory_format=torch.contiguous_format)
            found = operation(given, attributes)
            return found if isinstance(found, tuple) else (found,)

        return run

    def _range(self, start: int, limit: int, step: int) -> Tensor:
        return torch.arange(start, limit, step, device=self._operators.device)

    def _choice(self, node: NodeProto) -> Run:
        """Compile an If; reading its condition synchronises with the device."""
        branches = {one.name: self._inner(one) for one in node.attribute}
        condition = node.input[0]

        def run(scope: Scope) -> Sequence[Tensor]:
            branch = branches["then_branch" if bool(scope[condition]) else "else_branch"]
            return branch.run(Scope({}, scope))

        return run

    def _loop(self, node: NodeProto) -> Run:
        """Compile a Loop of a known number of iterations; outputs not carried are stacked along a new first axis."""
        (attribute,) = node.attribute
        body, names = self._inner(attribute), [one.name for one in attribute.g.input]
        count, _, *starts = node.input

        def run(scope: Scope) -> Sequence[Tensor]:
            carried, listed = [scope[name] for name in starts], []
            for iteration in range(int(scope[count])):
                given = torch.tensor(iteration), torch.tensor(True), *carried
                _, *found = body.run(Scope(dict(zip(names, given, strict=True)), scope))
                carried = found[: len(starts)]
                listed.append(found[len(starts) :])
            return [*carried, *(torch.stack(parts) for parts in zip(*listed, strict=True))]

        return run

    def _inner(self, attribute: AttributeProto) -> NodeProgram:
        graph = attribute.g
        outputs = [one.name for one in graph.output]
        return NodeProgram(graph.node, outputs, self._operators, attributes=self._attributes)

    def _attributes_of(self, node: NodeProto) -> dict[str, Any]:
        """Return the attributes by name, those of the enclosing function by their values."""
        found = {}
        for one in node.attribute:
            value = self._attributes[one.ref_attr_name] if one.ref_attr_name else helper.get_attribute_value(one)
            found[one.name] = value.decode() if isinstance(value, bytes) else value
        return found


def _is_shared(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether one of the others is a view of the tensor's memory."""
    memory = tensor.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == memory for other in others)


def _constant(value: Any) -> Tensor:
    """Return a tensor, of ONNX or a number."""
    return torch.tensor(value) if isinstance(value, int) else from_numpy(numpy_helper.to_array(value))
