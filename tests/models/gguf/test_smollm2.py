"""A real model, pretrained by others, from its GGUF file: as transformers reads it, and as an engine answers."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvc_trt import build
from kvc_trt.cli.main import run
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.presets import load_preset
from tests.models.gguf.tiny import TEXTS

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
PROMPT = "The lighthouse keeper wrote in his logbook every evening. " * 40 + "He never missed a"


@pytest.fixture(scope="module", autouse=True)
def _header_read_once():
    """transformers reads the whole file's header anew for the configuration, the tokenizer and the weights."""
    gguf = pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        yield


@pytest.fixture(scope="module")
def theirs(smollm2_gguf):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf):
    contents = GgufCheckpoint(smollm2_gguf).tokenizer_contents()
    return Tokenizer.from_str(contents["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def engine(smollm2_gguf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / "smollm2"
    build(
        "smollm2-135m-instruct", checkpoint=str(smollm2_gguf), policy="full", max_input_len=1024, max_output_len=64,
        weights="fp32", verify=False, output=directory,
    )  # fmt: skip
    return directory


def test_the_file_has_the_presets_configuration(smollm2_gguf):
    preset = load_preset("smollm2-135m-instruct")
    preset.file.check(smollm2_gguf)
    config = GgufCheckpoint(smollm2_gguf).config
    assert config.norm_epsilon == pytest.approx(preset.config.norm_epsilon, rel=1e-6)
    for name in ("vocab_size", "num_hidden_layers", "head_size", "rotary_base", "tie_word_embeddings", "eos_token_ids"):
        assert getattr(config, name) == getattr(preset.config, name), name


@pytest.mark.exhaustive
def test_tensors_are_those_of_transformers(smollm2_gguf, theirs):
    checkpoint, state = GgufCheckpoint(smollm2_gguf), theirs.state_dict()
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.read(name), state[name].numpy(), err_msg=name)


def test_ids_are_those_of_transformers_where_it_splits_as_the_model_does(smollm2_gguf, tokenizer):
    """transformers does not know `smollm` and splits as GPT-2: spaces and lines in front of a digit differ."""
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    for text in (*TEXTS, PROMPT):
        assert tokenizer.encode(text).ids == other(text).input_ids
    text = "a\n\n1"
    assert tokenizer.encode(text).tokens == ["a", "ĊĊ", "1"]
    assert other.tokenize(text) == ["a", "Ċ", "Ċ", "1"]


def test_the_engines_logits_are_those_of_transformers(engine, tokenizer, theirs):
    import onnxruntime
    import torch

    ids = tokenizer.encode(PROMPT).ids
    session = onnxruntime.InferenceSession(engine / "prefill.onnx", providers=["CPUExecutionProvider"])
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    padded = np.zeros((1, -(-len(ids) // 256) * 256), np.int64)  # the graph works in blocks
    padded[0, : len(ids)] = ids
    given = {"input_ids": padded, "prompt_lengths": np.array([len(ids)])}
    feed = {value.name: given[value.name].astype(kinds[value.type]) for value in session.get_inputs()}
    (logits,) = session.run(["logits"], feed)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits[0], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_question_is_answered_through_the_files_own_template(engine, capfd):
    question = "What is the capital of France? Answer in one short sentence."
    assert run(["run", str(engine), "--chat", question, "--max-new-tokens", "24", "--json"]) == 0
    (output,) = json.loads(capfd.readouterr().out)["outputs"]
    assert "Paris" in output["text"]
    assert output["finish_reason"] == "stop"
