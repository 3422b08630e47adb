"""`kvc-trt export` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvc_trt.backends.tensorrt_llm.llm_api_file import parse
from kvc_trt.cli.main import run
from kvc_trt.models.presets import build_configs_directory

CONFIG = build_configs_directory() / "llama3.1-8b-rocketkv.yaml"
EXPRESSIBLE = [
    path
    for path in sorted(build_configs_directory().glob("*.yaml"))
    if path.stem.endswith(("-rocketkv", "-hybrid"))
    and not ("expected" in path.stem or path.stem.startswith("longchat"))
]


@pytest.mark.parametrize("path", EXPRESSIBLE, ids=lambda path: path.stem)
def test_the_export_prints_the_requested_file(path, capfd):
    assert run(["export", "llm-api", str(path)]) == 0
    captured = capfd.readouterr()
    assert parse(captured.out).sparse_attention_config.algorithm == "rocket"
    assert captured.err == ""
    assert str(path) in " ".join(captured.out.replace("#", " ").split())


def test_a_dash_exports_to_standard_output(capfd):
    assert run(["export", "llm-api", str(CONFIG), "-o", "-"]) == 0
    assert "trtllm-serve meta-llama/Llama-3.1-8B-Instruct --config" in capfd.readouterr().out


def test_a_file_appears_whole_with_a_summary(tmp_path, capfd):
    target = tmp_path / "rocket.yaml"
    assert run(["export", "llm-api", str(CONFIG), "-o", str(target)]) == 0
    assert parse(target.read_text()).sparse_attention_config.topk == 64
    printed = capfd.readouterr().out
    assert printed.startswith(f"{target}: ")
    for part in ("changed: page_size 3 -> 4", "limits:  GPUs of compute capability 10.0", "differs: selection"):
        assert part in printed
    assert [path.name for path in tmp_path.iterdir()] == ["rocket.yaml"]


def test_an_existing_file_stays_unless_forced(tmp_path, capfd):
    target = tmp_path / "rocket.yaml"
    target.write_text("mine")
    assert run(["export", "llm-api", str(CONFIG), "-o", str(target)]) == 2
    assert "exists and is not replaced" in capfd.readouterr().err
    assert target.read_text() == "mine"
    assert run(["export", "llm-api", str(CONFIG), "-o", str(target), "--force"]) == 0
    parse(target.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["rocket.yaml"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_directory_is_never_a_file(force, tmp_path, capfd):
    assert run(["export", "llm-api", str(CONFIG), "-o", str(tmp_path), *force]) == 2
    assert "is a directory" in capfd.readouterr().err


def test_a_missing_parent_is_named(tmp_path, capfd):
    assert run(["export", "llm-api", str(CONFIG), "-o", str(tmp_path / "none" / "x.yaml")]) == 2
    assert "none is not a directory" in capfd.readouterr().err


def test_a_dangling_link_counts_as_existing(tmp_path, capfd):
    target = tmp_path / "link.yaml"
    target.symlink_to("nowhere")
    assert run(["export", "llm-api", str(CONFIG), "-o", str(target)]) == 2
    assert target.is_symlink()
    assert not (tmp_path / "nowhere").exists()
    capfd.readouterr()


def test_json_is_alone_on_stdout(tmp_path, capfd):
    target = tmp_path / "rocket.yaml"
    assert run(["export", "llm-api", str(CONFIG), "-o", str(target), "--json"]) == 0
    exported = json.loads(capfd.readouterr().out)
    assert exported["file"] == str(target)
    assert exported["configuration"] == parse(target.read_text()).model_dump()
    assert exported["traffic"]["theirs"] <= exported["traffic"]["ours"]


def test_an_engine_gives_what_its_own_configuration_gives(tiny_engine, capfd):
    printed = []
    for source in (tiny_engine, tiny_engine / "config.json"):
        assert run(["export", "llm-api", str(source)]) == 0
        printed.append(parse(capfd.readouterr().out))
    assert printed[0] == printed[1]
    parameters = json.loads((tiny_engine / "config.json").read_text())["kv_compression"]["parameters"]
    assert printed[0].sparse_attention_config.prompt_budget == parameters["prompt_budget"]


def test_a_changed_engine_is_refused(tiny_engine, capfd):
    config = tiny_engine / "config.json"
    config.write_bytes(config.read_bytes().replace(b'"top_k": 16', b'"top_k": 17'))
    assert run(["export", "llm-api", str(tiny_engine)]) == 2
    assert "is not the one that was built" in capfd.readouterr().err


def test_a_directory_that_is_no_engine_is_refused(tmp_path, capfd):
    assert run(["export", "llm-api", str(tmp_path)]) == 2
    assert "is not an engine directory" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stem", "message"),
    [
        ("llama3.1-8b-full", "leave sparse_attention_config out"),
        ("llama3.1-8b-snapkv++", "export policy rocketkv"),
        ("longchat-7b-v1.5-32k-rocketkv", "skip_layers: 0"),
    ],
)
def test_a_policy_that_the_llm_api_cannot_express_is_refused(stem, message, tmp_path, capfd):
    target = tmp_path / "rocket.yaml"
    assert run(["export", "llm-api", str(CONFIG.with_name(f"{stem}.yaml")), "-o", str(target)]) == 2
    assert message in capfd.readouterr().err
    assert not target.exists()


def test_skip_layers_can_be_given_up_in_the_configuration(tmp_path, capfd):
    config = tmp_path / "build.yaml"
    config.write_text(CONFIG.with_name("longchat-7b-v1.5-32k-rocketkv.yaml").read_text() + "skip_layers: 0\n")
    assert run(["export", "llm-api", str(config)]) == 0
    parse(capfd.readouterr().out)


@pytest.mark.parametrize("content", ["", "modell: x", "model: [", "model: no-such-model"])
def test_a_broken_configuration_is_refused_in_one_line(content, tmp_path, capfd):
    config = tmp_path / "build.yaml"
    config.write_text(content)
    assert run(["export", "llm-api", str(config)]) == 2
    assert capfd.readouterr().err.startswith("error: ")


def test_the_engine_layout_needs_an_engine_of_that_backend(tiny_engine, tmp_path, capfd):
    assert run(["export", "tensorrt-llm", str(tiny_engine), "-o", str(tmp_path / "out")]) == 2
    assert "was built for onnxruntime, expected tensorrt-llm" in capfd.readouterr().err


def test_nothing_heavy_is_imported():
    script = f"""
import sys
from kvc_trt.cli.main import run
assert run(["export", "llm-api", {str(CONFIG)!r}]) == 0
found = sorted({{"torch", "onnx", "onnxruntime", "transformers", "tensorrt", "tensorrt_llm"}} & set(sys.modules))
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
