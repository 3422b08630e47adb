"""models, policies, doctor and inspect: readable tables, and JSON alone on stdout."""

from __future__ import annotations

import json

import pytest

from kvc_trt.backends import onnxruntime, probes, torch
from kvc_trt.backends.registry import names
from kvc_trt.cli.main import run
from kvc_trt.cli.text.printing import ranges
from tests.engine.test_manifest import fields_of, reseal


def json_of(capfd, arguments):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def text_of(capfd, arguments):
    assert run(arguments) == 0
    return capfd.readouterr().out


def test_models_lists_every_preset(capfd):
    models = {model["name"]: model for model in json_of(capfd, ["models"])["models"]}
    assert models["llama3.1-8b"]["num_hidden_layers"] == 32
    assert models["llama3.1-8b"]["hugging_face_id"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert models["retrieval-tiny"]["hugging_face_id"] is None
    text = text_of(capfd, ["models"])
    assert all(name in text for name in models)


def test_policies_lists_every_policy(capfd):
    policies = {policy["name"]: policy for policy in json_of(capfd, ["policies"])["policies"]}
    assert {"full", "rocketkv", "rocketkv-v1", "rocketkv-v2", "snapkv++", "hybrid", "snapkv-gqa"} <= set(policies)
    assert "2502.14051" in policies["rocketkv"]["source"]
    assert policies["exact-topk"]["engines"] == []
    assert "onnxruntime" in policies["h2o"]["engines"]
    assert policies["rocketkv"]["engines"] == policies["full"]["engines"] == [*names()]
    text = text_of(capfd, ["policies"])
    assert all(name in text for name in policies)
    assert text.count("none: oracle") == 2


def test_doctor_says_what_works_and_what_would_help(capfd, monkeypatch):
    answer = {backend["name"]: backend for backend in json_of(capfd, ["doctor"])["backends"]}
    assert list(answer) == ["reference", "onnxruntime", "openvino", "tensorrt", "tensorrt-llm", "torch"]
    assert answer["onnxruntime"]["usable"]
    assert "onnxruntime" in answer["onnxruntime"]["versions"]
    assert not answer["tensorrt"]["usable"]
    for module in (probes, onnxruntime.backend, torch.backend):
        monkeypatch.setattr(
            module, "import_package", lambda package: ({}, (f"Python package {package} (not installed)",))
        )
    text = text_of(capfd, ["doctor"])
    assert "pip install 'kvc-trt[verify]'" in text
    assert "pip install --upgrade onnxruntime" in text


def test_inspect_shows_numbers_files_and_state(tiny_engine, capfd):
    answer = json_of(capfd, ["inspect", str(tiny_engine)])
    assert answer["intact"] is True
    assert answer["pretrained_config"]["num_hidden_layers"] == 2
    assert answer["build_config"]["max_input_len"] == 256
    assert answer["kv_compression"]["parameters"]["token_budget"] == 32
    counted = 0
    for tensor in answer["kv_compression"]["state"]:
        size = 4
        for extent in tensor["shape"]:
            size *= extent
        counted += size
    assert answer["state_bytes_per_row"] == counted
    assert set(answer["files"]) == {"config.json", "prefill.onnx", "decode.onnx", "extend.onnx", "weights.safetensors"}
    text = text_of(capfd, ["inspect", str(tiny_engine)])
    assert "intact" in text
    assert answer["files"]["decode.onnx"]["sha256"][:12] in text
    assert "prompts are token ids" in text


def test_inspect_shows_layers_and_how_to_get_cosines(tiny_engine, capfd):
    answer = json_of(capfd, ["inspect", str(tiny_engine), "--layers"])
    kept, slots = (answer["kv_compression"]["parameters"][name] for name in ("prompt_budget", "capacity"))
    assert [one["layer"] for one in answer["layers"]] == [0, 1]
    for one in answer["layers"]:
        assert (one["cosine"], one["group"]) == (None, None)
        assert one["caches"] == [{"heads": 2, "budget": kept, "slots": slots}]
    text = text_of(capfd, ["inspect", str(tiny_engine), "--layers"])
    assert text.count("--layer-budget squeeze, with a policy that evicts, measures and records them") == 1
    assert "decode state of one row: " in text


def test_inspect_refuses_a_damaged_engine(tiny_engine, capfd):
    with (tiny_engine / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert run(["inspect", str(tiny_engine)]) == 2
    streams = capfd.readouterr()
    assert "weights.safetensors was changed" in streams.err
    assert "hint: rebuild it: kvc-trt build --config" in streams.err
    assert streams.out == ""


def test_inspect_of_a_strangers_engine_controls_no_terminal(tiny_engine, capfd):
    manifest = fields_of(tiny_engine)
    source = "a model\x1b]0;title\x07\ntokenizer  \u202eyes"
    reseal(tiny_engine, checkpoint={**manifest["checkpoint"], "source": source})
    directory = tiny_engine.rename(tiny_engine.with_name("engine\x1b[2J\nintact"))
    text = text_of(capfd, ["inspect", str(directory)])
    assert r"source     a model\x1b]0;title\x07\ntokenizer  \u202eyes" in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert len([line for line in text.split("\n") if line.startswith("tokenizer")]) == 1
    assert json_of(capfd, ["inspect", str(directory)])["checkpoint"]["source"] == source


def test_layers_are_written_as_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


@pytest.mark.parametrize("command", ["models", "policies", "doctor"])
def test_json_stands_alone_on_stdout(command, capfd):
    assert run([command, "--json"]) == 0
    assert capfd.readouterr().out.startswith("{")
