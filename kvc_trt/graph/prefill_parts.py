"""Cut a prefill graph into parts that run one after another, so that a prompt can wait between them.

    positions       cosines and sines of all positions, or their learned vectors
    step 0          embedding, and the first layer's queries, keys and values
    store 0         what the policy stores of the first layer
    step 1          the first layer's attention and feed-forward, and the second layer's queries, keys and values
    ...
    step L, store L the rest of the last layer; what is stored once all layers are known
    head            the logits of the last token

The parts are cut out of an engine's own graph, node by node. But for attention, every node of a step reads one token
at a time, and attention reads the keys and values up to its query: so a step can also run on some tokens only, a block
of them, with the same results for them as in the whole prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from kvc_trt.models.weights import POSITIONS
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.attention.sliding_attention import OVER_PROMPT
from kvc_trt.operators.shapes import HeadShape, Layout

LOGITS, TOKENS, LENGTHS = "logits", "input_ids", "prompt_lengths"


@dataclass(frozen=True)
class Part:
    """Some nodes of the graph. Names are those of the whole graph."""

    nodes: tuple[NodeProto, ...]
    inputs: tuple[str, ...]
    """Inputs of the graph and values of other parts that it reads."""
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    """Outputs of the graph and values that other parts read."""
    up_to_block: frozenset[str] = frozenset()
    """Inputs of which a block of tokens reads all rows up to its end: the keys and values of attention."""


@dataclass(frozen=True)
class PrefillParts:
    """The parts of one prefill graph. Step s is followed by store s; a store may be empty."""

    positions: Part
    steps: tuple[Part, ...]
    stores: tuple[Part, ...]
    head: Part
    _whole: ModelProto = field(repr=False)

    @cached_property
    def weights(self) -> Mapping[str, TensorProto]:
        """The graph's initializers by name."""
        return {tensor.name: tensor for tensor in self._whole.graph.initializer}

    def model(self, part: Part, types: Mapping[str, int]) -> ModelProto:
        """Return a part as a model whose inputs are `in.0`, `in.1`, ...: `part.inputs`, then `part.weights`.

        Outputs are `out.0`, ... in the order of `part.outputs`. `types` holds the ONNX element types of the inputs.
        Weights are inputs too, so parts of equal layers give equal models.
        """
        reads = [*part.inputs, *part.weights]
        names = {name: f"in.{i}" for i, name in enumerate(reads)} | {"": ""}
        names |= {name: f"out.{i}" for i, name in enumerate(part.outputs)}
        for node in part.nodes:
            for name in node.output:
                names.setdefault(name, f"value.{len(names)}")
        inputs = [helper.make_tensor_value_info(names[name], types[name], None) for name in part.inputs]
        inputs += [
            helper.make_tensor_value_info(names[name], self.weights[name].data_type, self.weights[name].dims)
            for name in part.weights
        ]
        outputs = [helper.make_empty_tensor_value_info(names[name]) for name in part.outputs]
        return submodel(self._whole, [_renamed(node, names) for node in part.nodes], inputs, outputs)


def cut_prefill(model: ModelProto, keep: Collection[str] = ()) -> PrefillParts:
    """Cut a prefill graph; the model stays as it is. Stores also return those of their values that `keep` names.

    ValueError for a graph whose nodes hold graphs of their own (function bodies may), and for another graph.
    """
    return _Cut(model, keep).parts()


def check_flat(model: ModelProto) -> None:
    """Raise ValueError if the inputs of some node do not say all that it reads."""
    if any(attribute.HasField("g") for node in model.graph.node for attribute in node.attribute):
        raise ValueError("a node of the prefill graph holds a graph of its own: its inputs do not say what it reads")


def submodel(
    whole: ModelProto,
    nodes: Iterable[NodeProto],
    inputs: Iterable[ValueInfoProto],
    outputs: Iterable[ValueInfoProto],
    weights: Iterable[TensorProto] = (),
) -> ModelProto:
    """Return a model of some nodes, with those of the whole model's function bodies that they use.

    Attention over the prompt gets its present body: that of an older engine takes all queries or none. Bodies whose
    softmax has a cap or sinks are younger.
    """
    nodes = list(nodes)
    functions = [
        PREFILL_ATTENTION.body(Layout(HeadShape(None, None, 0)))
        if body.name == PREFILL_ATTENTION.name and not body.attribute
        else body
        for body in _called(whole, nodes)
    ]
    return helper.make_model(
        helper.make_graph(nodes, whole.graph.name, list(inputs), list(outputs), list(weights)),
        functions=functions,
        opset_imports=whole.opset_import,
        ir_version=whole.ir_version,
    )


def _called(whole: ModelProto, nodes: Iterable[NodeProto]) -> list[FunctionProto]:
    called = {node.op_type for node in nodes if node.domain == KVC_DOMAIN}
    return [body for body in whole.functions if body.name in called]


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("name")  # it names the layer
    copy.input[:] = [names[name] for name in node.input]
    copy.output[:] = [names[name] for name in node.output]
    return copy


class _Cut:
    """The part to which each node of one graph belongs."""

    def __init__(self, model: ModelProto, keep: Collection[str]) -> None:
        check_flat(model)
        self._model, self._nodes = model, list(model.graph.node)
        self._weights = [tensor.name for tensor in model.graph.initializer]
        self._producer = {name: i for i, node in enumerate(self._nodes) for name in node.output if name}
        if not any(_is_attention(node) for node in self._nodes):
            raise ValueError(f"no prefill graph: no node is {' or '.join(sorted(OVER_PROMPT))}")
        self._results = {output.name for output in model.graph.output} | set(keep)
        self._prepare()
        self._owner = [self._owner_of(index) for index in range(len(self._nodes))]
        self._cross = self._crossing()

    def parts(self) -> PrefillParts:
        count = 1 + max(self._stage)
        return PrefillParts(
            self._positions_part(),
            tuple(self._part(("step", stage)) for stage in range(count)),
            tuple(self._part(("store", stage)) for stage in range(count)),
            self._part(("head", count - 1)),
            self._model,
        )

    def _prepare(self) -> None:
        """Find the dependencies of every node; each node comes after those that it reads."""
        self._light: list[bool] = []
        """True if the node depends on no token's value: lengths, shapes and values of weights alone."""
        self._of_lengths: list[bool] = []
        self._stage: list[int] = []
        """The number of layers whose attention it depends on."""
        for node in self._nodes:
            before = [self._producer[name] for name in node.input if name in self._producer]
            reads_tokens = TOKENS in node.input and node.op_type != "Shape"
            self._light.append(not reads_tokens and all(self._light[index] for index in before))
            self._of_lengths.append(LENGTHS in node.input or any(self._of_lengths[index] for index in before))
            self._stage.append(max((self._stage[index] for index in before), default=0) + _is_attention(node))
        self._needed = self._ancestors(self._producer[LOGITS])
        rotations = [self._nodes[i] for i in self._needed if self._nodes[i].op_type == "RotaryEmbedding"]
        learned = [self._nodes[i] for i in self._needed if POSITIONS in self._nodes[i].input]
        rows = [name for node in rotations for name in node.input[1:3]] + [node.output[0] for node in learned]
        self._of_positions = tuple(dict.fromkeys(rows))
        """They are the only light values with a row per token: a block of tokens cannot count its positions."""

    def _ancestors(self, index: int) -> set[int]:
        """Return a node and all nodes that it needs."""
        found, pending = set[int](), [index]
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending += [self._producer[name] for name in self._nodes[index].input if name in self._producer]
        return found

    def _owner_of(self, index: int) -> tuple[str, int] | None:
        """Return the part of a node; None for a light one, which every part that reads it has for itself."""
        last = max(self._stage)
        if self._light[index]:
            return ("store", last) if self._results.intersection(self._nodes[index].output) else None
        if index not in self._needed:
            return "store", self._stage[index]
        return ("head", last) if self._of_lengths[index] else ("step", self._stage[index])

    def _crossing(self) -> set[str]:
        """Return the values that a part reads and another writes, and all results."""
        crossing = set(self._results)
        for index, node in enumerate(self._nodes):
            for name in node.input:
                writer = self._owner[self._producer[name]] if name in self._producer else None
                if writer is not None and not self._light[self._producer[name]] and writer != self._owner[index]:
                    crossing.add(name)
        return crossing

    def _part(self, owner: tuple[str, int]) -> Part:
        own = {index for index, found in enumerate(self._owner) if found == owner}
        outputs = [name for index in sorted(own) for name in self._nodes[index].output if name in self._cross]
        attention = (self._nodes[index] for index in own if _is_attention(self._nodes[index]))
        return self._of(own, outputs, frozenset(name for node in attention for name in node.input[1:3]))

    def _positions_part(self) -> Part:
        own = {index for name in self._of_positions for index in self._ancestors(self._producer[name])}
        return self._of(own, self._of_positions)

    def _of(self, own: set[int], outputs: Iterable[str], up_to_block: frozenset[str] = frozenset()) -> Part:
        """Return the part that owns these nodes, with the light ones that they read."""
        nodes = self._with_light(own)
        produced = {name for node in nodes for name in node.output}
        read = dict.fromkeys(name for node in nodes for name in node.input if name and name not in produced)
        weights = [name for name in read if name in set(self._weights)]
        inputs = [name for name in read if name not in set(weights)]
        return Part(tuple(nodes), tuple(inputs), tuple(weights), tuple(outputs), up_to_block)

    def _with_light(self, own: set[int]) -> list[NodeProto]:
        found, pending = set[int](), list(own)
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                read = [self._producer[n] for n in self._nodes[index].input if n in self._producer]
                pending += [i for i in read if self._light[i] and not self._is_of_positions(i, own)]
        return [self._nodes[index] for index in sorted(found, key=self._place)]

    def _place(self, index: int) -> tuple[bool, bool, int]:
        """Return the sort key of a part's nodes: constants, which all layers share with the first one, come first."""
        return self._nodes[index].op_type != "Constant", not self._light[index], index

    def _is_of_positions(self, index: int, own: set[int]) -> bool:
        """True if the part of positions has computed it."""
        return index not in own and bool(set(self._of_positions).intersection(self._nodes[index].output))


def _is_attention(node: NodeProto) -> bool:
    return node.domain == KVC_DOMAIN and node.op_type in OVER_PROMPT
