from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.rounding import assert_close

ROOT = Path(__file__).resolve().parents[2]

LAYOUT = Layout(HeadShape(None, None, 0))


def causal(query, keys, values):
    batch, _, length, size = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, length, size).astype(np.float64)
    scores = np.einsum("bgasd,bgtd->bgast", grouped, keys) / np.sqrt(size)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bgast,bgtd->bgasd", weights, values).reshape(query.shape)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_equals_plain_causal_attention_across_blocks(heads, kv_heads):
    node = SingleNode(PREFILL_ATTENTION.body(LAYOUT), {})
    query, keys, values = normal(0, 2, heads, 384, 16), normal(1, 2, kv_heads, 384, 16), normal(2, 2, kv_heads, 384, 16)
    assert_close(node(query, keys, values)["o"], causal(query, keys, values), 2e-6)


def test_right_padding_never_reaches_a_real_token():
    node = SingleNode(PREFILL_ATTENTION.body(LAYOUT), {})
    query, keys, values = normal(0, 1, 4, 256, 16), normal(1, 1, 2, 256, 16), normal(2, 1, 2, 256, 16)
    clean = node(query, keys, values)["o"][:, :, :130]
    for array in (query, keys, values):
        array[:, :, 130:] = 1e4
    np.testing.assert_array_equal(node(query, keys, values)["o"][:, :, :130], clean)


@pytest.mark.parametrize("last", [128, 256, 384])
def test_the_last_queries_alone_get_the_same_bits(last):
    node = SingleNode(PREFILL_ATTENTION.body(LAYOUT), {})
    query, keys, values = normal(0, 1, 8, 384, 16), normal(1, 1, 2, 384, 16), normal(2, 1, 2, 384, 16)
    some = np.ascontiguousarray(query[:, :, -last:])
    np.testing.assert_array_equal(node(some, keys, values)["o"], node(query, keys, values)["o"][:, :, -last:])


def test_half_precision_scores_in_single():
    node = SingleNode(PREFILL_ATTENTION.body(LAYOUT), {})
    arrays = [normal(seed, 1, 4, 128, 16).astype(np.float16) for seed in range(3)]
    result = node(*arrays)["o"]
    assert result.dtype == np.float16
    np.testing.assert_allclose(result, causal(*arrays), atol=2e-3)


def test_every_product_is_made_block_by_block():
    body = PREFILL_ATTENTION.body(LAYOUT)
    outside = {node.op_type for node in body.node}
    (loop,) = (node for node in body.node if node.op_type == "Loop")
    inside = {node.op_type for node in loop.attribute[0].g.node}
    assert not outside & {"MatMul", "Softmax"}
    assert {"MatMul", "Softmax", "Slice"} <= inside


MEASURE = """
import resource, sys
import numpy as np
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode
node = SingleNode(PREFILL_ATTENTION.body(Layout(HeadShape(None, None, 0))), {})
def run(length):
    node(*(np.ones((1, heads, length, 16), np.float32) for heads in (4, 1, 1)))
run(128)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(int(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_stays_far_below_the_scores_of_the_whole_prompt():
    """16,384 tokens and 4 heads: one S x S matrix would take 4 GiB."""
    process = subprocess.run([sys.executable, "-c", MEASURE, "16384"], check=True, capture_output=True, cwd=ROOT)
    assert int(process.stdout) * 1024 < 0.1 * 4 * 4 * 16384**2
