"""TensorRT-LLM's engine directory: both plans with their configuration, and nothing is ever half there."""

from __future__ import annotations

import json

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.tensorrt_llm import engine_directory
from kvc_trt.backends.tensorrt_llm.engine_directory import (
    PHASES,
    directory_config,
    export_engine,
    write_engine_directories,
)
from kvc_trt.errors import InputError
from kvc_trt.files.held import HeldFile

OURS = {
    "version": "0.1.0",
    "pretrained_config": {"architecture": "LlamaForCausalLM", "dtype": "float16"},
    "build_config": {"max_input_len": 128, "max_seq_len": 160, "max_batch_size": 8, "max_beam_width": 1,
                     "kv_cache_type": "CONTINUOUS", "plugin_config": {}, "kvc_trt": {"model": "m"}},
    "kv_compression": {"parameters": {"policy": "rocketkv"}},
}  # fmt: skip
DEMANDED = ("max_input_len", "max_seq_len", "max_batch_size", "max_beam_width", "max_num_tokens", "opt_num_tokens")
"""Keys that upstream's BuildConfig.from_dict takes without a default."""


@pytest.fixture
def plans(tmp_path):
    paths = {phase: tmp_path / f"{phase}.engine" for phase in PHASES}
    for phase, path in paths.items():
        path.write_bytes(b"plan of " + phase.encode())
    return paths


def _configs():
    return {phase: directory_config(OURS, "1.2.1", 1024) for phase in PHASES}


def held(plans):
    return {phase: HeldFile(path) for phase, path in plans.items()}


def test_context_and_generation_are_written_whole(tmp_path, plans):
    target = tmp_path / "engine"
    write_engine_directories(target, _configs(), held(plans))
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()) == [
        "decode/config.json", "decode/rank0.engine", "prefill/config.json", "prefill/rank0.engine",
    ]  # fmt: skip
    for phase in PHASES:
        assert json.loads((target / phase / "config.json").read_bytes()) == _configs()[phase]
        assert (target / phase / "rank0.engine").read_bytes() == plans[phase].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.engine", "engine", "prefill.engine"]


def test_the_configuration_has_three_sections_and_what_upstream_demands():
    config = directory_config(OURS, "1.2.1", 1024)
    assert set(config) == {"version", "pretrained_config", "build_config"}
    assert config["version"] == "1.2.1"
    assert set(DEMANDED) <= set(config["build_config"])
    assert config["build_config"]["kv_compression"] == OURS["kv_compression"]
    assert "kvc_trt" not in config["build_config"]


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_an_existing_target_is_never_replaced(kind, tmp_path, plans):
    target = tmp_path / "engine"
    {"file": target.touch, "directory": target.mkdir, "link": lambda: target.symlink_to("nowhere")}[kind]()
    with pytest.raises(InputError, match="exists and is not replaced"):
        write_engine_directories(target, _configs(), held(plans))


def test_a_failed_write_leaves_no_files(tmp_path, plans, monkeypatch):
    placed = []

    def fail_the_second(source, destination):
        placed.append(destination)
        if len(placed) == 2:
            raise OSError(28, "No space left on device")
        destination.write_bytes(source.read())

    monkeypatch.setattr(engine_directory, "place", fail_the_second)
    with pytest.raises(OSError, match="No space left"):
        write_engine_directories(tmp_path / "engine", _configs(), held(plans))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.engine", "prefill.engine"]


def test_an_engine_of_another_backend_is_refused(tiny_engine, tmp_path):
    with pytest.raises(InputError, match="was built for onnxruntime, expected tensorrt-llm") as caught:
        export_engine(open_engine(tiny_engine), tmp_path / "out")
    assert "export llm-api" in caught.value.hint
    assert not (tmp_path / "out").exists()
