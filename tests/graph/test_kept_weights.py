"""`--weights keep`: engines that hold a GGUF file's own blocks, also where matrices of a layer differ in type."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.graph.weights import EngineWeights, GraphWeights, write_weights
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.random_weights import RandomWeights
from tests.models.gguf.tiny import write

MIXED = {
    "attn_q.weight": "Q4_1", "attn_k.weight": "Q8_0", "attn_v.weight": "F16", "ffn_gate.weight": "Q4_0",
    "ffn_up.weight": "Q4_1", "attn_output.weight": "F32", "token_embd.weight": "Q4_1",
}  # fmt: skip
ROUNDED_INPUT = 0.04
"""Rounding the input of each of the 15 products to 8 bits costs a matrix of random weights about 2 %."""
LENGTHS = ("--max-input-len", "256", "--max-output-len", "32")
VARIANTS = {
    "Q4_0": {"kind": "Q4_0"},
    "Q8_0, tied": {"kind": "Q8_0", "tied": True},
    "as the real one": {"kind": "Q4_1", "kinds": {"token_embd.weight": "Q8_0"}, "tied": True},
    "mixed": {"kind": "Q4_0", "kinds": MIXED},
    "mixed, tied, biased": {"architecture": "qwen2", "kind": "Q4_1", "kinds": MIXED, "tied": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_weights_are_the_files_values_bit_for_bit(variant, tmp_path):
    checkpoint = GgufCheckpoint(write(tmp_path / "model.gguf", **VARIANTS[variant]))
    path = tmp_path / "weights.safetensors"
    write_weights(checkpoint.config, checkpoint, path, weights="keep", length=64)
    stored = EngineWeights(path)
    assert set(stored.names()) == set(checkpoint.names())
    for name in checkpoint.names():
        assert stored.shape(name) == checkpoint.shape(name)
        np.testing.assert_array_equal(stored.read(name), checkpoint.read(name).astype(np.float32), err_msg=name)
    assert GraphWeights(path).quantised


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_but_for_the_rounded_input(variant, tmp_path, capfd):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import onnxruntime

    file, engine = write(tmp_path / "model.gguf", **VARIANTS[variant]), tmp_path / "engine"
    build = ["build", "--model", str(file), "--policy", "full", "--weights", "keep", *LENGTHS, "--no-verify"]
    assert run([*build, "-o", str(engine)]) == 0
    ids = np.random.default_rng(3).integers(0, 340, (1, 256))
    session = onnxruntime.InferenceSession(engine / "prefill.onnx", providers=["CPUExecutionProvider"])
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    given = {"input_ids": ids, "prompt_lengths": np.array([ids.size])}
    feed = {value.name: given[value.name].astype(kinds[value.type]) for value in session.get_inputs()}
    (logits,) = session.run(["logits"], feed)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[:, -1].numpy()
    assert np.linalg.norm(logits - expected) < ROUNDED_INPUT * np.linalg.norm(expected)


def test_blocks_that_an_engine_cannot_hold_are_refused_with_the_reason(tmp_path):
    path = write(tmp_path / "model.gguf", kind="Q4_0", kinds={"blk.0.ffn_down.weight": "Q6_K"})
    checkpoint = GgufCheckpoint(path)
    with pytest.raises(
        InputError, match=r"0\.mlp\.down_proj\.weight is Q6_K, which an engine cannot hold exactly"
    ) as caught:
        write_weights(checkpoint.config, checkpoint, tmp_path / "weights", weights="keep", length=8)
    assert "--weights int8" in (caught.value.hint or "")
    assert not (tmp_path / "weights").exists()


def test_only_a_gguf_file_has_blocks_to_keep(tmp_path):
    config = GgufCheckpoint(write(tmp_path / "model.gguf")).config
    with pytest.raises(InputError, match="no blocks to keep; expected a GGUF file"):
        write_weights(config, RandomWeights(config, 0), tmp_path / "weights", weights="keep", length=8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("level", ["ops", "logits", "tokens"])
@pytest.mark.slow
def test_a_kept_engine_passes_verification(level, tmp_path, capfd):
    file, engine = write(tmp_path / "model.gguf", **VARIANTS["mixed"]), tmp_path / "engine"
    build = ["build", "--model", str(file), "--token-budget", "64", "--weights", "keep", *LENGTHS, "--no-verify"]
    assert run([*build, "-o", str(engine)]) == 0
    assert run(["verify", str(engine), "--level", level, "--checkpoint", str(file)]) == 0
