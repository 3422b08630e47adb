"""Write ONNX nodes as if they were function calls.

    emit = Emitter()
    scores = emit.MatMul(query, keys)
    values, indices = emit.TopK(scores, [8], outputs=2, axis=-1)

Operands are value names; Python numbers, lists and numpy arrays become constants, each written once. `None` omits an
optional input. The same class writes graphs, function bodies and the branches of If and Loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

Value = str
Operand = Any


@dataclass(frozen=True)
class Reference:
    """An INT attribute of a node in a function's body that has the value of the function's attribute of this name."""

    name: str


class Emitter:
    """Collects the nodes of one graph, function body or branch, in order."""

    def __init__(self, parent: Emitter | None = None) -> None:
        self.nodes: list[NodeProto] = []
        self._parent = parent
        self._constants: dict[Any, Value] = {}
        self._serial: Iterator[int] = parent._serial if parent else itertools.count()
        self._scope: str = parent._scope if parent else ""

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *operands, **keywords: self.call(op_type, *operands, **keywords)

    def call(
        self,
        op_type: str,
        *operands: Operand,
        outputs: int | Sequence[str] = 1,
        domain: str = "",
        **attributes: Any,
    ) -> Any:
        """Append one node and return the name of its output, or a tuple of names if it has several.

        `outputs` is their number, or their names if other code must find them.
        """
        inputs = [self._operand(operand) for operand in operands]
        name = f"{self._scope}{op_type}_{next(self._serial)}"
        if isinstance(outputs, int):
            names = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
        else:
            names = list(outputs)
        referring = {key: value for key, value in attributes.items() if isinstance(value, Reference)}
        plain = {key: value for key, value in attributes.items() if key not in referring}
        node = helper.make_node(op_type, inputs, names, name=name, domain=domain, **plain)
        for key, value in referring.items():
            node.attribute.append(AttributeProto(name=key, ref_attr_name=value.name, type=AttributeProto.INT))
        self.nodes.append(node)
        return names[0] if len(names) == 1 else tuple(names)

    def attribute(self, name: str) -> Value:
        """Return an INT attribute of the enclosing function as an INT64 scalar."""
        key = ("attribute", name)
        if (found := self._find(key)) is None:
            found = self.call("Constant")
            reference = AttributeProto(name="value_int", ref_attr_name=name, type=AttributeProto.INT)
            self.nodes[-1].attribute.append(reference)
            self._constants[key] = found
        return found

    def reference(self, name: str) -> Reference:
        """Return an INT attribute of the enclosing function as the value of a node's attribute."""
        return Reference(name)

    def cast(self, value: Operand, dtype: Any, *, outputs: int | Sequence[str] = 1) -> Value:
        """Convert `value` to the ONNX type of a numpy type."""
        return str(self.call("Cast", value, outputs=outputs, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))

    def constant(self, value: Operand) -> Value:
        """Return a constant; int and list of int become INT64, float becomes FLOAT, arrays keep their type."""
        array = _array(value)
        key = (array.dtype.str, str(array.dtype), array.shape, array.tobytes())
        if (found := self._find(key)) is None:
            found = self.call("Constant", value=numpy_helper.from_array(array))
            self._constants[key] = found
        return found

    def branch(self, build: Callable[[Emitter], Sequence[Value]]) -> GraphProto:
        """Return the graph of an If branch: `build` writes it and returns its outputs."""
        inner = Emitter(self)
        results = build(inner)
        outputs = [helper.make_empty_tensor_value_info(result) for result in results]
        return helper.make_graph(inner.nodes, f"branch_{next(self._serial)}", [], outputs)

    def choose(
        self,
        condition: Value,
        then: Callable[[Emitter], Sequence[Value]],
        otherwise: Callable[[Emitter], Sequence[Value]],
        *,
        outputs: int,
    ) -> Any:
        """Append an If; both branches return the same number of values."""
        branches = {"then_branch": self.branch(then), "else_branch": self.branch(otherwise)}
        return self.call("If", condition, outputs=outputs, **branches)

    def collect(self, count: Value, body: Callable[[Emitter, Value], Value]) -> Value:
        """Loop `count` times and stack what `body(emitter, iteration)` returns along a new first axis."""
        return self.collect_all(count, lambda inner, iteration: [body(inner, iteration)])[0]

    def collect_all(self, count: Value, body: Callable[[Emitter, Value], Sequence[Value]]) -> Sequence[Value]:
        """Like `collect`, for a body that returns several values."""
        serial = next(self._serial)
        iteration, alive, still = f"iteration_{serial}", f"alive_{serial}", f"still_{serial}"
        inner = Emitter(self)
        results = body(inner, iteration)
        inner.nodes.append(helper.make_node("Identity", [alive], [still], name=f"Identity_{serial}"))
        inputs = [
            helper.make_tensor_value_info(iteration, TensorProto.INT64, []),
            helper.make_tensor_value_info(alive, TensorProto.BOOL, []),
        ]
        outputs = [
            helper.make_tensor_value_info(still, TensorProto.BOOL, []),
            *(helper.make_empty_tensor_value_info(result) for result in results),
        ]
        graph = helper.make_graph(inner.nodes, f"loop_{serial}", inputs, outputs)
        found = self.call("Loop", count, None, outputs=len(results), body=graph)
        return (found,) if isinstance(found, str) else found

    def accumulate(self, count: Value, start: Value, body: Callable[[Emitter, Value, Value], Value]) -> Value:
        """Loop `count` times over a value, at first `start`; `body(emitter, iteration, value)` returns the next one."""
        return str(self._carry(count, start, lambda inner, iteration, value: [body(inner, iteration, value)]))

    def scan(
        self, count: Value, start: Value, body: Callable[[Emitter, Value, Value], tuple[Value, Value]]
    ) -> tuple[Value, Value]:
        """Like `accumulate`, for a body that also returns a result; return the last value, and all results stacked."""
        last, stacked = self._carry(count, start, body)
        return last, stacked

    def _carry(self, count: Value, start: Value, body: Callable[[Emitter, Value, Value], Sequence[Value]]) -> Any:
        serial = next(self._serial)
        iteration, alive, still, value = (f"{name}_{serial}" for name in ("iteration", "alive", "still", "carried"))
        inner = Emitter(self)
        results = body(inner, iteration, value)
        inner.nodes.append(helper.make_node("Identity", [alive], [still], name=f"Identity_{serial}"))
        inputs = [
            helper.make_tensor_value_info(iteration, TensorProto.INT64, []),
            helper.make_tensor_value_info(alive, TensorProto.BOOL, []),
            helper.make_empty_tensor_value_info(value),
        ]
        outputs = [
            helper.make_tensor_value_info(still, TensorProto.BOOL, []),
            *(helper.make_empty_tensor_value_info(result) for result in results),
        ]
        graph = helper.make_graph(inner.nodes, f"loop_{serial}", inputs, outputs)
        return self.call("Loop", count, None, start, outputs=len(results), body=graph)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix all names written inside, so that profiles and errors name the layer."""
        outer, self._scope = self._scope, f"{self._scope}{name}/"
        yield
        self._scope = outer

    def _operand(self, operand: Operand) -> Value:
        if operand is None:
            return ""
        return operand if isinstance(operand, str) else self.constant(operand)

    def _find(self, key: Any) -> Value | None:
        emitter: Emitter | None = self
        while emitter is not None:
            if key in emitter._constants:
                return emitter._constants[key]
            emitter = emitter._parent
        return None


def make_function(
    domain: str,
    name: str,
    inputs: Sequence[str],
    outputs: Mapping[str, Value],
    attributes: Sequence[str],
    emit: Emitter,
    *,
    opset: int,
) -> FunctionProto:
    """Return the function whose body `emit` has written; `outputs` maps formal names to values of the body."""
    _rename(emit.nodes, {value: formal for formal, value in outputs.items()})
    others = sorted({node.domain for node in emit.nodes} - {""})
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(other, 1) for other in others)]
    return helper.make_function(domain, name, inputs, list(outputs), emit.nodes, imports, attributes)


def _rename(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> None:
    for node in nodes:
        for operands in (node.input, node.output):
            operands[:] = [names.get(operand, operand) for operand in operands]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g.node, names)
                for output in attribute.g.output:
                    output.name = names.get(output.name, output.name)


def _array(value: Operand) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, bool):
        return np.array(value)
    if isinstance(value, float):
        return np.array(value, dtype=np.float32)
    return np.array(value, dtype=np.int64)
