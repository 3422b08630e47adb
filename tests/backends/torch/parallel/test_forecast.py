"""`plan` forecasts each rank's memory by shapes, and the limits of a 70B model on four GPUs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.parallel.weights import ShardedSource, read_shard
from kvc_trt.cli.main import run
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.models.sharding import shards
from tests.small_model import SMALL as MODEL

CPU = torch.device("cpu")
PLAN = (
    "plan", "--model", "llama3.1-70b", "--policy", "rocketkv", "--token-budget", "2048", "--max-input-len", "32640",
    "--tp", "4", "--max-batch-size", "8",
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_its_part_and_takes_the_forecast_bytes(tied, precision, ranks, make_program):
    model = replace(MODEL, tie_word_embeddings=tied, qkv_bias=True, output_bias=True)
    path = make_program("full", precision, model=model).weight_file
    whole, dtype = EngineWeights(path), torch.float32 if precision == "fp32" else torch.bfloat16
    for shard in shards(model, ranks):
        found = read_shard(path, shard, CPU, dtype)
        own = [tensor for layer in found.layers for tensor in layer.values()]
        tensors = [*own, found.embedding, found.norm, *([] if tied else [found.head])]
        assert sum(tensor.nbytes for tensor in tensors) == memory.shard_bytes(shard, dtype.itemsize)
        source = ShardedSource(path, shard)
        for name in whole.names():
            extent = shard.extent(name, whole.shape(name))
            expected = whole.read(name)[tuple(slice(axis.start, axis.stop) for axis in extent)]
            assert (source.read(name) == expected).all(), name
            assert source.dtype(name) == whole.dtype(name)
        head = whole.read("model.embed_tokens.weight" if tied else "lm_head.weight")
        rows = shard.vocabulary
        expected = torch.from_numpy(head[rows.start : rows.stop].astype("float32"))
        torch.testing.assert_close(found.head.float(), expected)


def test_a_70b_model_fits_four_h100(capsys):
    assert run([*PLAN, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found, h100 = plan["tensor_parallel"], plan["gpus"][0]
    assert found["weight_bytes"] == pytest.approx(36.9e9, rel=0.01)
    assert found["compressed"]["total_bytes"] < found["full"]["total_bytes"]
    assert found["sums_per_step"] == 160
    assert (plan["ranks"], h100["holds_the_engine"], h100["use"]) == (4, True, None)
    assert h100["largest_batch"]["compressed"] > 2 * h100["largest_batch"]["full"] >= 8


def test_every_table_of_a_plan_counts_one_rank(capsys):
    """Each GPU reads a quarter of the matrices and of the cache, and a step of one GPU would not fit."""
    assert run([*PLAN, "--json"]) == 0
    divided = json.loads(capsys.readouterr().out)
    assert run([*PLAN[:-4], "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["speed"] == whole["break_even"] == []
    assert [gpu["first_token_floor_ms"] for gpu in whole["gpus"]] == [None, None]
    step = divided["speed"][0]
    read = whole["weights"]["read_bytes_per_step"] + whole["traffic"]["bytes_per_row"]
    assert step["compressed"]["floor_ms"] == pytest.approx(1e3 * read / 4 / 3.35e12, rel=0.01)
    assert run(PLAN) == 0
    text = capsys.readouterr().out
    assert "each of 4 ranks has 16 of 64 query heads, 2 of 8 KV heads and 7,168 of 28,672 channels" in text
    assert "each of 4 GPUs: batches that fit 90% of its memory" in text
    assert "one GPU" not in text


def test_a_rank_reads_its_part_of_the_chosen_experts(capsys):
    model = ["plan", "--model", "qwen3-30b-a3b", "--policy", "rocketkv", "--json"]
    assert run(model) == 0
    whole = json.loads(capsys.readouterr().out)["weights"]
    assert run([*model, "--tp", "4"]) == 0
    found = json.loads(capsys.readouterr().out)["tensor_parallel"]
    assert "192 of 768 channels of each expert" in found["shares"]
    assert found["weight_bytes_read_per_step"] == pytest.approx(whole["read_bytes_per_step"] / 4, rel=0.03)
    assert found["expert_bytes"] > 9 * found["weight_bytes_read_per_step"]


def test_one_gpu_too_few_names_how_many(capsys):
    assert run(PLAN[:-4]) == 0
    text = capsys.readouterr().out
    assert "H100: weights alone are 131.4 GiB, and 67.1 GiB can be used: use --tp 4" in text
    assert "H200: weights alone are 131.4 GiB, and 118.2 GiB can be used: use --tp 2" in text
    assert "tokens/s" not in text
    assert run([*PLAN[:-4], "--tp", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(gpu["holds_the_engine"], gpu["use"]) for gpu in plan["gpus"]] == [(False, "--tp 4"), (True, None)]
    assert run([*PLAN[:-4], "--weights", "fp8", "--json"]) == 0
    h100 = json.loads(capsys.readouterr().out)["gpus"][0]
    assert h100["use"] == "--weights bf16 --tp 4"
