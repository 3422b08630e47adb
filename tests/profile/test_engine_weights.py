"""The bytes of weights that a step reads, against the blocks that a GGUF file really has."""

from __future__ import annotations

import pytest

from kvc_trt.engine.program import NO_FILE, Program
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.weights import write_weights
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.policies import resolve
from kvc_trt.profile.engine_weights import engine_weight_bytes
from kvc_trt.profile.model_size import count_parameters, weight_bytes
from tests.models.gguf.tiny import write

BYTES_PER_WEIGHT = {"Q4_0": 18 / 32, "Q4_1": 22 / 32, "Q8_0": 34 / 32, "F16": 4.0}
"""Weights in an engine's types: float16 scales, float32 offsets, floats in float32."""


def kept(directory, **options) -> Program:
    checkpoint = GgufCheckpoint(write(directory / "model.gguf", **options))
    path = directory / "weights.safetensors"
    write_weights(checkpoint.config, checkpoint, path, weights="keep", length=64)
    parameters = resolve("full", model=checkpoint.config, token_budget=32, max_input_len=32, max_output_len=32)
    return Program(checkpoint.config, parameters, (), HeldFile(path), NO_FILE, NO_FILE)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("table", BYTES_PER_WEIGHT)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_kept_blocks_are_counted_in_the_file(tmp_path, kind, table, tied):
    program = kept(tmp_path, kind=kind, kinds={"token_embd.weight": table}, tied=tied)
    counts = count_parameters(program.model)
    found = engine_weight_bytes(program, "keep")
    read = counts.linear * BYTES_PER_WEIGHT[kind] + 4 * counts.vectors
    read += counts.lm_head * BYTES_PER_WEIGHT[table if tied else kind]
    assert found.per_step == read
    assert found.resident == read + (0 if tied else counts.embedding * BYTES_PER_WEIGHT[table])


def test_other_formats_follow_from_the_shape(tmp_path):
    program = kept(tmp_path, kind="Q4_0")
    assert engine_weight_bytes(program, "int8") == weight_bytes(program.model, "int8")
