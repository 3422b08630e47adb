"""Cache shapes that the parser cannot see, fixed on the way out.

A layer that keeps the whole prompt pads it to its capacity by a computed amount; what comes out has the right size, but
the parser reports it as unknown, and nothing could be planned from it. A Reshape to the declared size costs nothing.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from kvc_trt.backends.tensorrt.lowering.target import Target

COMPUTED_SIZE = frozenset(("Pad",))
"""Operators whose output size is computed from their inputs' values."""


def fix_output_shapes(model: ModelProto, target: Target) -> list[str]:
    """Put a Reshape to [batch, declared sizes] behind every computed size that leaves the graph."""
    outputs = {output.name: output for output in model.graph.output}
    nodes: list[NodeProto] = []
    fixed = 0
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type in COMPUTED_SIZE and node.output[0] in outputs:
            nodes += _fixed(node, outputs[node.output[0]])
            fixed += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return [f"fixed the shape of {fixed} outputs"] if fixed else []


def _fixed(node: NodeProto, output: ValueInfoProto) -> list[NodeProto]:
    dims = output.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in dims]  # 0 keeps the batch
    name = f"{output.name}.shape"
    node.output[0] = f"{output.name}.padded"
    constant = helper.make_tensor(name, TensorProto.INT64, [len(sizes)], sizes)
    return [
        helper.make_node("Constant", [], [name], name=name, value=constant),
        helper.make_node("Reshape", [node.output[0], name], [output.name], name=f"{output.name}.reshape"),
    ]
