"""Two commands lead from a GGUF file to an answer; transformers answers the same from the same file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvc_trt.cli.main import run
from tests.models.gguf.tiny import write

LENGTHS = ("--max-input-len", "256", "--max-output-len", "32")
BUILD = ("build", "--policy", "full", *LENGTHS, "--weights", "fp32", "--model")
TOLERANCE = 1e-4


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "tiny.gguf", kind="Q4_1", tied=True, pre="qwen2")


@pytest.fixture
def engine(file, tmp_path, capfd):
    directory = tmp_path / "engine"
    assert run([*BUILD, str(file), "--no-verify", "-o", str(directory)]) == 0
    capfd.readouterr()
    return directory


def test_two_commands_from_a_file_to_an_answer(file, engine, capfd):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    prompt = "The capital of France is"
    assert run(["run", str(engine), "--prompt", prompt, "--max-new-tokens", "12", "--ignore-eos", "--json"]) == 0
    (output,) = json.loads(capfd.readouterr().out)["outputs"]
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)[0].tolist()
    assert output["prompt_token_ids"] == ids[0].tolist()
    assert output["token_ids"] == expected[ids.shape[1] :]


def test_the_engines_logits_are_those_of_transformers(file, engine):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import onnxruntime

    ids = np.random.default_rng(3).integers(0, 340, (1, 200))
    session = onnxruntime.InferenceSession(engine / "prefill.onnx", providers=["CPUExecutionProvider"])
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    padded = np.pad(ids, ((0, 0), (0, 256 - ids.size)))  # the graph works in blocks
    given = {"input_ids": padded, "prompt_lengths": np.array([ids.size])}
    feed = {value.name: given[value.name].astype(kinds[value.type]) for value in session.get_inputs()}
    (logits,) = session.run(["logits"], feed)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[:, -1].numpy()
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_engine_has_the_tokenizer_and_says_where_it_came_from(file, engine, capfd):
    tokenizer = engine / "tokenizer"
    assert (tokenizer / "chat_template.jinja").is_file()
    assert json.loads((tokenizer / "generation_config.json").read_text())["eos_token_id"] == [2]
    assert run(["inspect", str(engine), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["checkpoint"]["source"] == f"checkpoint {file}"


def test_a_repeated_build_is_up_to_date_and_another_file_is_another_build(file, engine, capfd):
    command = [*BUILD, str(file), "--no-verify", "-o", str(engine)]
    assert run(command) == 0
    assert "up to date" in capfd.readouterr().out
    write(file, kind="Q4_1", tied=True, pre="gpt-2")
    assert run(command) == 2
    assert "another build (different weights, tokenizer)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"kind": "Q4_0"}, "keep"),
        ({"kind": "Q4_1", "kinds": {"token_embd.weight": "Q8_0"}, "tied": True}, "keep"),
        ({"kind": "Q8_0", "kinds": {"attn_v.weight": "F16"}}, "keep"),
        ({"kind": "F16"}, "fp32"),
        ({"kind": "Q4_0", "kinds": {"attn_v.weight": "Q5_0"}}, "fp32"),
    ],
)
def test_blocks_that_an_engine_can_hold_are_kept_by_default(options, weights, tmp_path, capfd):
    file, directory = write(tmp_path / "tiny.gguf", **options), tmp_path / "engine"
    assert run(["build", "--model", str(file), *LENGTHS, "--no-verify", "-o", str(directory), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["configuration"]["weights"] == weights
    assert run(["plan", "--model", str(file), "--backend", "onnxruntime", "--json"]) == 0
    assert (json.loads(capfd.readouterr().out)["weights"]["format"] == "keep") == (weights == "keep")


def test_random_weights_have_no_blocks(file, tmp_path, capfd):
    command = ["build", "--model", str(file), *LENGTHS, "--random-weights", "0", "--no-verify", "--json"]
    assert run([*command, "-o", str(tmp_path / "engine")]) == 0
    assert json.loads(capfd.readouterr().out)["configuration"]["weights"] == "fp32"


def test_plan_needs_only_the_gguf_file(file, capfd):
    assert run(["plan", "--model", str(file), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre": "chameleon"}, "tokenizer.ggml.pre is 'chameleon'"),
        ({"absent": ("tokenizer.ggml.model",)}, "tokenizer.ggml.model is missing"),
        ({"absent": ("blk.0.ffn_up.weight",)}, "missing"),
        ({"architecture": "bloom"}, "general.architecture is 'bloom'"),
    ],
)
def test_a_file_that_cannot_be_read_exactly_is_refused_in_one_line(options, message, tmp_path, capfd):
    path = write(tmp_path / "bad.gguf", **options)
    output = tmp_path / "engine"
    assert run(["build", "--model", str(path), *LENGTHS, "--no-verify", "-o", str(output)]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not output.exists()


def test_a_checkpoint_is_given_once(file, capfd):
    assert run(["build", "--model", str(file), "--checkpoint", str(file), "--no-verify"]) == 2
    assert "--model is a checkpoint already" in capfd.readouterr().err


def test_tasks_are_made_with_the_files_own_tokenizer(file):
    from kvc_trt.tasks.tokenizer import load_task_tokenizer

    tokenizer = load_task_tokenizer(str(file))
    assert tokenizer.encode("The capital") == tokenizer.tokenizer.encode("The capital").ids
    assert tokenizer.positions == 1024
