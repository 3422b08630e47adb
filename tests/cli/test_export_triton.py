"""`kvc-trt export triton` as a user meets it."""

from __future__ import annotations

import json

import pytest

from kvc_trt.cli.main import run
from kvc_trt.serving.triton.config_schema import parsed


def test_the_export_says_how_to_start_and_ask_on_loopback(tiny_engine, tmp_path, capfd):
    assert run(["export", "triton", str(tiny_engine), "-o", str(tmp_path / "repo"), "--rows", "3"]) == 0
    model, start, ask = capfd.readouterr().out.splitlines()
    assert model == f"{tmp_path}/repo/engine: policy rocketkv, prompts to 256 tokens, 3 answers at once"
    assert f"--model-repository={tmp_path}/repo --model-control-mode=none" in start
    assert "--http-address=127.0.0.1 --grpc-address=127.0.0.1 --disable-auto-complete-config" in start
    assert ask.endswith("""127.0.0.1:8000/v2/models/engine/generate -d '{"input_ids": [1, 2], "max_tokens": 8}'""")


def test_settings_arrive_in_the_configuration(tiny_engine, tmp_path, capfd):
    settings = {"rows": "3", "queue-limit": "5", "memory-bytes": "1000000", "prefill-slice-ms": "20.5", "threads": "1"}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = ["export", "triton", str(tiny_engine), "-o", str(tmp_path / "r"), "--name", "a.b"]
    assert run([*command, *options, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["model"], printed["directory"]) == ("a.b", f"{tmp_path}/r/a.b")
    found = parsed((tmp_path / "r" / "a.b" / "config.pbtxt").read_text()).parameters
    assert {name: found[name.replace("-", "_")].string_value for name in settings} == settings
    assert found["engine_sha256"].string_value == printed["engine_sha256"]


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a}b", "../up"])
def test_a_bad_name_writes_nothing(name, tiny_engine, tmp_path, capfd):
    target = tmp_path / "repo"
    assert run(["export", "triton", str(tiny_engine), "-o", str(target), "--name", name]) == 2
    assert "is not a name for a model" in capfd.readouterr().err
    assert not target.exists()


def test_a_changed_engine_is_refused(tiny_engine, tmp_path, capfd):
    weights = tiny_engine / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert run(["export", "triton", str(tiny_engine), "-o", str(tmp_path / "repo")]) == 2
    assert "weights.safetensors" in capfd.readouterr().err
    assert not (tmp_path / "repo").exists()
