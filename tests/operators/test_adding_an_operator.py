"""An operator is added by one file: graphs, the C ABI, PyTorch, TensorRT's lowering and plugins know it from there."""

from __future__ import annotations

import json
import subprocess
import sys

SOURCE = """
from kvc_trt.operators.schema import Attribute, Kernel, Operator
from kvc_trt.operators.tensors import CACHE_LENGTHS, K_CACHE, OUTPUT, QUERY, updated


def _write(emit, layout):
    scaled = emit.Mul("query", emit.CastLike(emit.attribute("factor"), "query"))
    return {"output": scaled, "k_cache_out": emit.Identity("k_cache")}


THROW_AWAY = Operator(
    name="KvcThrowAway",
    summary="Multiply a query by a number.",
    inputs=(QUERY, K_CACHE, CACHE_LENGTHS),
    outputs=(OUTPUT, updated(K_CACHE)),
    attributes=(Attribute("factor", 1, 9, "of the query", bits=32),),
    write=_write,
    kernel=Kernel("kvc_throw_away", "KvcThrowAwayParams"),
)
"""

PROGRAM = """
import json, sys
import kvc_trt.operators
kvc_trt.operators.__path__.append(sys.argv[1])

from kvc_trt.backends.tensorrt.lowering.operators import FIELDS
from kvc_trt.kernels.ops import kvc, schema
from kvc_trt.kernels.structs import struct_of
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.registry import KERNEL_OPERATORS, OPERATORS
from kvc_trt.operators.shapes import HeadShape, Layout
import torch

operator, emit = OPERATORS["KvcThrowAway"], Emitter()
made = operator.call(emit, {"query": "q", "k_cache": "k", "cache_lengths": "n"}, factor=3)
meta = [torch.empty(shape, device="meta") for shape in ((2, 4, 16), (2, 2, 9, 16))]
print(json.dumps({
    "has a kernel": operator in KERNEL_OPERATORS,
    "body": [list(part) for body in [operator.body(Layout(HeadShape(4, 2, 16)))] for part in (body.input, body.output)],
    "node": [emit.nodes[0].op_type, list(made)],
    "struct": [name for name, _ in struct_of(operator)._fields_],
    "torch": schema(operator),
    "shape": list(kvc.throw_away(*meta, torch.empty(2, dtype=torch.int64, device="meta"), 3).shape),
    "fields": FIELDS["KvcThrowAway"],
}))
"""


def test_one_file_is_enough(tmp_path):
    (tmp_path / "throw_away.py").write_text(SOURCE)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "has a kernel": True,
        "body": [["query", "k_cache", "cache_lengths"], ["output", "k_cache_out"]],
        "node": ["KvcThrowAway", ["output", "k_cache_out"]],
        "struct": [
            "struct_bytes", "dtype", "batch", "heads", "kv_heads", "head_size", "factor", "capacity",
            "query", "k_cache", "cache_lengths", "output",
        ],
        "torch": "throw_away(Tensor query, Tensor(a!) k_cache, Tensor cache_lengths, int factor) -> Tensor",
        "shape": [2, 4, 16],
        "fields": ["factor"],
    }  # fmt: skip
