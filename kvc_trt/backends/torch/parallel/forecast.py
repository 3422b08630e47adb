"""The GPU memory that each rank of an engine needs, by formula: without weights, PyTorch or a GPU."""

from __future__ import annotations

from typing import Any

from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.policy_path import lacks_kernels
from kvc_trt.graph.state import ITEM_SIZE, state_tensors
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sharding import describe_shards, shards


def rank_memory(
    model: ModelConfig, parameters: PolicyParameters, rows: int, ranks: int, *, turns: bool
) -> dict[str, Any]:
    """Return the bytes of rank 0, which holds as much as any other. `model` has the type that the engine computes in.

    `prefill` is that of one prompt of the longest kind with its result; of the two kinds of work, prefill and step, the
    larger one counts, since they take turns. `weight_bytes_read_per_step` is that of one row, which reads only the
    experts that its token chooses.
    """
    shard, itemsize = shards(model, ranks)[0], ITEM_SIZE[model.dtype]
    weights = memory.shard_bytes(shard, itemsize)
    rotary = memory.rotary_bytes(model, parameters)
    step = memory.step_bytes(shard.local, rows, itemsize) + 2 * rows * model.vocab_size * memory.FLOAT
    sides = {}
    for name, side in (("compressed", parameters), ("full", parameters.keeping_everything())):
        state = state_tensors(shard.local, side, model.dtype, turns=turns and side.no_turn is None)
        row = memory.cache_bytes(state, 1)
        tokens = parameters.max_input_len
        prefill = memory.prefill_bytes(shard.local, state, 1, tokens, itemsize=itemsize)
        if lacks_kernels(model, side):
            prefill += memory.operation_bytes(shard.local, 1, tokens)
        if side.cache_format.keys is not None:
            prefill += memory.storing_bytes(shard.local, 1, tokens, itemsize=itemsize)
        sides[name] = {
            "cache_bytes_per_row": row,
            "prefill_bytes": prefill,
            "total_bytes": weights + rotary + rows * row + max(prefill, step),
        }
    embedding = model.vocab_size * model.hidden_size * itemsize
    read = len(shard.vocabulary) * model.hidden_size * itemsize if model.tie_word_embeddings else 0
    experts, part = memory.expert_bytes(shard.local, itemsize), model.description.experts
    others = 0 if part is None else experts - experts * part.chosen // part.count
    return {
        "ranks": ranks,
        "shares": describe_shards(model, ranks),
        "rows": rows,
        "prompt_tokens": parameters.max_input_len,
        "weight_bytes": weights,
        "weight_bytes_read_per_step": weights - embedding + read - others,
        "expert_bytes": experts,
        "rotary_bytes": rotary,
        "step_bytes": step,
        **sides,
        "sums_per_step": 2 * model.num_hidden_layers,
        "sum_bytes_per_row": model.hidden_size * itemsize,
    }
