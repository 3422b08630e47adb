"""Model the device memory of an engine in PyTorch by formula, and refuse work that does not fit.

All formulas count bytes from shapes; none allocates, or needs PyTorch. Activations are upper bounds: they count a
layer's peak as if nothing were freed early.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvc_trt.backends.torch.policy_path import lacks_kernels
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import StateTensor
from kvc_trt.models.weights import expected_tensors
from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.operators.linear.delta_rule import CHUNK as LINEAR_CHUNK
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    import torch

    from kvc_trt.engine.program import Program
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.sharding import Shard

FLOAT, INT64 = 4, 8
PREFILL_BLOCK = 8192
"""Tokens per block of projections and feed-forward, enough to keep a GPU busy."""
LINEAR_BLOCK = 2048
"""Tokens that a linear layer takes in together: of each it makes many vectors in float32."""
PLAN_BUCKET = 256
"""Lengths of prompts on a GPU are rounded up to a multiple of this."""
TURN_BLOCK = 1024
"""Queries of a turn that attend together where there is no flash kernel."""
STEP_TOKENS = 16
"""The most tokens whose experts' matrices are copied; more are grouped by expert."""


def weight_bytes(model: ModelConfig, itemsize: int, *, own_head: bool) -> int:
    """Return the bytes of the weights; `own_head`: the head is not the embedding."""
    shapes = expected_tensors(model)
    elements = sum(math.prod(shape) for shape in shapes.values())
    if own_head and "lm_head.weight" not in shapes:
        elements += model.vocab_size * model.hidden_size
    return elements * itemsize


def shard_bytes(shard: Shard, itemsize: int) -> int:
    """Return the bytes of one rank's weights; a tied head is a part of the embedding."""
    parts = (shard.extent(name, shape) for name, shape in expected_tensors(shard.model).items())
    return itemsize * sum(math.prod(map(len, part)) for part in parts)


def expert_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the matrices of all experts."""
    return itemsize * sum(
        math.prod(shape) for name, shape in expected_tensors(model).items() if ".mlp.experts." in name
    )


def rotary_bytes(model: ModelConfig, parameters: PolicyParameters) -> int:
    """Return the bytes of the rotary tables: cosines and sines of every position, float32."""
    return (1 + len(model.rotary_bases)) * parameters.max_sequence_len * model.head_size * FLOAT


def cache_bytes(state: Iterable[StateTensor], rows: int) -> int:
    """Return the bytes of the state of this many rows."""
    return rows * sum(tensor.bytes_per_row() for tensor in state)


def prefill_bytes(
    model: ModelConfig, state: Iterable[StateTensor], rows: int, length: int, *, itemsize: int,
    block: int = PREFILL_BLOCK,
) -> int:  # fmt: skip
    """Return the bytes of a prefill of `rows` prompts of `length` tokens: results, one full cache, activations."""
    tokens, size = rows * length, model.head_size
    queries, pairs = model.num_attention_heads * size, 2 * model.num_key_value_heads * size
    # Residual stream, queries, attention's output, keys and values; in float32 also a type's copy of the latter, and
    # their repetition for every query head, which the attention kernel of that type needs; in half types queries, keys
    # and values padded to a bucket (`prompt_attention.py`).
    copies = pairs + 2 * queries if itemsize == FLOAT else (queries + pairs) * bool(length % PLAN_BUCKET)
    whole = tokens * (model.hidden_size + 2 * queries + pairs + copies) * itemsize
    # The joined projections and their rotation in float32; gate, up and their product; three hidden vectors.
    joined = (queries + pairs) * (itemsize + 3 * FLOAT)
    inner = 4 * _inner_size(model) * itemsize
    blocks = min(block, tokens) * (max(joined, inner) + 3 * model.hidden_size * itemsize + model.hidden_size * FLOAT)
    last = tokens % block or min(tokens, block)
    blocks += _copied_expert_bytes(model, last, itemsize) if last <= STEP_TOKENS else 0
    blocks = max(blocks, _linear_bytes(model, min(block, LINEAR_BLOCK, tokens), itemsize))
    # On a CPU, the mask of a block of queries of a prompt that attends in several.
    mask = min(length, TURN_BLOCK) * length * (FLOAT + 1) if itemsize == FLOAT else 0
    # Compaction's statistics and votes: a pair per key chunk and window row, a vote per key.
    votes = tokens * model.num_key_value_heads * 2 * FLOAT
    logits = rows * model.vocab_size * (FLOAT + itemsize)
    return cache_bytes(state, rows) + whole + blocks + mask + votes + logits


def _inner_size(model: ModelConfig) -> int:
    """Return the inner channels of the widest feed-forward block of a token, or of one expert's tokens."""
    experts = model.description.experts
    if experts is None:
        return model.intermediate_size
    return max(model.intermediate_size, experts.size, experts.shared_size)


def _linear_bytes(model: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of a linear layer's values for the tokens that it processes together; 0 if the model has none.

    In the weights' type the stream, what is read of it, and the convolution's inputs; in float32 the convolution, the
    vectors of heads before and after the triangular system, and the products of a chunk's keys and queries.
    """
    part = next((one.linear for one in model.description.attention if one.linear is not None), None)
    if part is None:
        return 0
    heads = part.value_heads * (9 * part.key_size + 7 * part.value_size + 5 * LINEAR_CHUNK)
    rows = 3 * model.hidden_size + 2 * part.channels
    return tokens * (rows * itemsize + (4 * part.channels + heads) * FLOAT)


def _copied_expert_bytes(model: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of copies of the matrices of each token's experts."""
    experts = model.description.experts
    return 0 if experts is None else tokens * experts.chosen * 3 * experts.size * model.hidden_size * itemsize


def operation_bytes(model: ModelConfig, rows: int, length: int) -> int:
    """Return the additional bytes of a prefill whose caches run by nodes: copies, and the scores of a block of queries.

    Copies are queries and keys before the rotary embedding, heads gathered or repeated, and padding to whole blocks,
    all in float32.
    """
    heads, size = model.num_attention_heads, model.head_size
    padded = -(-length // PROMPT_BLOCK) * PROMPT_BLOCK
    copies = 5 * heads * size + 8 * model.num_key_value_heads * size
    scores = 4 * heads * PROMPT_BLOCK * padded
    return rows * (padded * copies + scores) * FLOAT


def storing_bytes(model: ModelConfig, rows: int, length: int, *, itemsize: int) -> int:
    """Return the additional bytes for storing a layer in a format: copies of keys and values, heads together.

    Where the reference stores them, in float32, it makes up to five tables of the size of keys or values on the way.
    """
    table = rows * length * model.num_key_value_heads * model.head_size
    return 2 * table * itemsize + (5 * table * FLOAT if itemsize == FLOAT else 0)


def prefill_bound(program: Program, rows: int, length: int, *, itemsize: int) -> int:
    """Return the bytes of a prefill of a program, including those for its policy's nodes and its caches' format."""
    model, parameters = program.model, program.parameters
    needed = prefill_bytes(model, program.state, rows, length, itemsize=itemsize)
    if lacks_kernels(model, parameters):
        needed += operation_bytes(model, rows, length)
    if parameters.cache_format.keys is not None:
        needed += storing_bytes(model, rows, length, itemsize=itemsize)
    return needed


def turn_bound(program: Program, rows: int, count: int, stored: int, *, itemsize: int) -> int:
    """Return the bytes of a turn of `rows` x `count` tokens after at most `stored` entries.

    Of one layer, the stored and new keys and values of all rows are copied, once for attention and once for their
    compaction; where there is no flash kernel, scores and mask of a block of queries come besides.
    """
    model, entries = program.model, stored + count
    activations = prefill_bytes(model, (), rows, count, itemsize=itemsize)
    pairs = 2 * model.num_key_value_heads * model.head_size * entries * (itemsize + FLOAT)
    together = min(count, TURN_BLOCK) if itemsize == FLOAT else 0
    scores = 2 * model.num_attention_heads * together * entries * FLOAT
    every = rows * count * model.vocab_size * (FLOAT + itemsize) if program.limits.all_logits else 0
    return activations + rows * (2 * pairs + scores) + every


def step_bytes(model: ModelConfig, rows: int, itemsize: int) -> int:
    """Return the bytes of a step: its buffers and its logits (twice: the product and the copy for the host)."""
    inner = rows * (3 * _inner_size(model) + 8 * model.hidden_size) * itemsize
    inner += _copied_expert_bytes(model, min(rows, STEP_TOKENS), itemsize)
    return rows * (2 + model.num_hidden_layers) * INT64 + 2 * rows * model.vocab_size * FLOAT + inner


def drawing_bytes(model: ModelConfig, rows: int) -> int:
    """Return the bytes of draws for `rows` rows: tables of the vocabulary's size, at most nine of 8 bytes at once."""
    return 9 * rows * model.vocab_size * INT64


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated, on a GPU including the memory that PyTorch keeps for reuse."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    import psutil

    return int(psutil.virtual_memory().available)


def require(needed: int, what: str, device: torch.device, hint: str) -> None:
    """Raise UnsupportedEnvironment, before anything is allocated, if `what` ("X need") does not fit."""
    free = free_bytes(device)
    if needed > free:
        where = "this machine" if device.type == "cpu" else str(device)
        lacking = f"{where} has {readable_size(free)} free, {readable_size(needed - free)} too few"
        raise UnsupportedEnvironment(f"{what} {readable_size(needed)}; {lacking}", hint=hint)


@contextmanager
def said(what: str, device: torch.device, hint: str) -> Iterator[None]:
    """Raise UnsupportedEnvironment if `what` runs out of memory after all: other processes use the GPU too."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().partition("\n")[0]
        free = free_bytes(device)
        raise UnsupportedEnvironment(
            f"{what} ran out of memory, {readable_size(free)} are free: {reason}", hint=hint
        ) from error
