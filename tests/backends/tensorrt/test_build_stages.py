"""A TensorRT engine directory without TensorRT: its stages, its target, and refusals before any work."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys

import numpy as np
import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.registry import backend, backends, names
from kvc_trt.backends.tensorrt.format import GRAPHS, plan_file
from kvc_trt.backends.tensorrt.module import load_tensorrt, version_of
from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.manifest import canonical, sealed
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.engine.resolution.resolve import resolve
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.kernels.structs import ABI_VERSION
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.sources.fp8 import as_floats
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.progress import NullProgress
from tests.models.fp8_weights import fp8_directory

TARGET = {
    "backend": "tensorrt",
    "architecture": "sm_90",
    "tensorrt": "11.4.0.106",
    "plugins": {"file": "libkvc_plugins.so", "sha256": "0" * 64, "abi": ABI_VERSION},
    "compatibility": "none",
}


def resolved(model, backend="tensorrt", **settings):
    config = BuildConfig(
        **{"model": str(model), "random_weights": 0, "token_budget": 64, "max_output_len": 32, **settings}
    )
    return resolve(config, choose_model(str(model)), backend, backends())


@pytest.mark.parametrize("name", names())
def test_every_backend_has_makers_for_its_stages(name, tiny_model):
    found = backend(name)
    drafts = {"draft_tokens": 2} if "draft" in found.files else {}
    made = found.makers(resolved(tiny_model, name, weights="fp16", **drafts), None, NullProgress())
    assert made.keys() == found.files.keys()


def test_the_reference_is_no_backend_to_build_for():
    with pytest.raises(InputError, match="unknown backend 'reference'") as caught:
        backend("reference")
    assert caught.value.hint == "one of auto, onnxruntime, openvino, tensorrt, tensorrt-llm, torch"


@pytest.mark.parametrize(("dtype", "weights"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp16")])
def test_weights_default_to_the_checkpoints_own_16_bit_type(tiny_model, tmp_path, dtype, weights):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    request = resolved(directory)
    assert request.config.weights == weights
    assert request.dtype == request.model.dtype == {"bf16": "bfloat16", "fp16": "float16"}[weights]


@pytest.fixture
def fp8_model(tiny_model, tmp_path):
    """The tiny model's checkpoint in fp8."""
    fields = json.loads((tiny_model / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    return fp8_directory(tmp_path / "fp8", parse_config(fields, "tiny"), fields)


@pytest.mark.parametrize(
    ("backend", "settings", "weights"),
    [
        ("tensorrt", {}, "fp8"),
        ("tensorrt", {"weights": "fp16"}, "fp16"),
        ("tensorrt", {"random_weights": 0}, "bf16"),
        ("torch", {}, "bf16"),
        ("tensorrt-llm", {}, "bf16"),
        ("onnxruntime", {}, "fp32"),
    ],
)
def test_a_checkpoint_in_fp8_stays_so_for_tensorrt_alone(fp8_model, backend, settings, weights):
    request = resolved(fp8_model, backend, **{"random_weights": None, **settings})
    assert request.config.weights == weights
    dtype = {"fp8": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[weights]
    assert request.dtype == request.model.dtype == dtype


def test_other_backends_dequantise_an_fp8_checkpoint_and_say_so(fp8_model, tmp_path, capfd):
    engine = tmp_path / "engine"
    lengths = ["--token-budget", "64", "--max-input-len", "128", "--max-output-len", "32"]
    assert run(["build", "--model", str(fp8_model), *lengths, "--no-verify", "-o", str(engine)]) == 0
    assert "the checkpoint's matrices in fp8 are dequantised for fp32" in capfd.readouterr().err
    weights, matrix = open_engine(engine).weights(), "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(weights.read(matrix), as_floats(Checkpoint(fp8_model)).read(matrix))


def test_plan_counts_fp8_weights_in_fp8(fp8_model, capsys):
    command = ["plan", "--model", str(fp8_model), "--token-budget", "64", "--max-output-len", "32", "--json"]
    sizes = {}
    for weights in ("auto", "bf16"):
        assert run([*command, "--backend", "tensorrt", "--weights", weights]) == 0
        sizes[weights] = json.loads(capsys.readouterr().out)
    assert sizes["auto"]["weights"]["format"] == "fp8"
    assert sizes["auto"]["weights"]["resident_bytes"] < sizes["bf16"]["weights"]["resident_bytes"]


@pytest.mark.parametrize(
    ("backend", "settings", "message"),
    [
        ("onnxruntime", {"weights": "bf16"}, "bf16: ONNX Runtime computes no bfloat16 on a CPU; .* takes fp32, fp16"),
        ("tensorrt", {"weights": "int4"}, "int4: weights are quantised for ONNX Runtime.*takes bf16, fp16, fp32"),
        ("torch", {"weights": "int8"}, "int8: weights are quantised for ONNX Runtime"),
        ("onnxruntime", {"weights": "fp8"}, "fp8: TensorRT alone multiplies matrices in fp8; any other kind is made"),
        ("tensorrt-llm", {"weights": "fp8"}, "fp8: TensorRT alone multiplies matrices in fp8"),
        ("onnxruntime", {"compatibility": "hardware"}, "compatibility: hardware is for --backend tensorrt"),
        ("tensorrt", {"dense_until": "auto"}, "--dense-until auto is measured on a CPU"),
    ],
)
def test_settings_that_a_backend_does_not_support_are_refused(tiny_model, backend, settings, message):
    with pytest.raises(InputError, match=message) as caught:
        resolved(tiny_model, backend, **settings)
    assert caught.value.hint or "compatibility" in settings


def test_version_compatible_engines_are_refused():
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="'none' or 'hardware'"):
        BuildConfig(model="any", compatibility="version")


def test_without_tensorrt_a_build_ends_before_any_work(tiny_arguments, tmp_path, capfd):
    if "tensorrt" in sys.modules or shutil.which("nvidia-smi"):
        pytest.skip("there may be a TensorRT here")
    assert run([*tiny_arguments, "--backend", "tensorrt", "-o", str(tmp_path / "engine")]) == 3
    lines = capfd.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert "tensorrt" in error.lower()
    assert any("kvc-trt" in line or "pip install" in line for line in lines if line != error)
    assert not (tmp_path / "engine").exists()


def test_a_missing_tensorrt_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UnsupportedEnvironment, match=r"package tensorrt .*expected TensorRT 10\.15 or newer") as caught:
        load_tensorrt()
    assert caught.value.hint == "pip install 'kvc-trt[tensorrt]'"


@pytest.mark.parametrize(("version", "numbers"), [("10.15.1.29", (10, 15)), ("11.4.0.106", (11, 4))])
def test_version_of_a_module_is_its_first_two_numbers(version, numbers):
    assert version_of(type("Module", (), {"__version__": version})) == numbers


def test_a_version_without_numbers_is_refused():
    with pytest.raises(UnsupportedEnvironment, match="calls its version 'dev'"):
        version_of(type("Module", (), {"__version__": "dev"}))


# --- the directory ---


@pytest.fixture
def compiled(tiny_engine):
    """An engine directory in the form that a TensorRT build leaves; its plans are no plans, only files."""

    def make(**changes):
        config = json.loads((tiny_engine / "config.json").read_text())
        config["build_config"]["kvc_trt"] |= {"backend": "tensorrt", "weights": "fp32"}
        manifest = json.loads((tiny_engine / "manifest.json").read_text())
        del manifest["sha256"]
        contents = {"config.json": canonical(config)}
        for graph in GRAPHS:
            contents |= {plan_file(graph): b"not a plan", f"inspector/{graph}.json": b"{}\n"}
        for name, content in contents.items():
            (tiny_engine / name).parent.mkdir(exist_ok=True)
            (tiny_engine / name).write_bytes(content)
            manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        for name in changes.pop("without", ()):
            (tiny_engine / name).unlink()
            del manifest["files"][name]
        manifest["inputs"]["target"] = "0" * 64  # that of another target
        manifest |= {"target": TARGET | changes, "build_config": config["build_config"]["kvc_trt"]}
        (tiny_engine / "manifest.json").write_bytes(sealed(manifest))
        return tiny_engine

    return make


def test_a_tensorrt_engine_opens_without_tensorrt(compiled, capfd):
    path = compiled()
    engine = open_engine(path)
    assert engine.backend == "tensorrt"
    assert run(["inspect", str(path), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["target"] == TARGET
    assert {"prefill.engine", "inspector/decode.json"} <= found["files"].keys()
    assert run(["inspect", str(path)]) == 0
    assert "for tensorrt" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["decode.engine", "inspector/prefill.json", "weights.safetensors"])
def test_an_engine_directory_without_one_of_its_files_is_refused(compiled, name):
    with pytest.raises(InputError, match=f"lists no {name}"):
        open_engine(compiled(without=[name]))


def test_a_damaged_plan_is_refused_with_the_command_that_rebuilds(compiled):
    path = compiled()
    (path / "decode.engine").write_bytes(b"not a pLan")
    with pytest.raises(InputError, match=r"decode\.engine was changed") as caught:
        open_engine(path)
    assert "kvc-trt build --config" in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "onnxruntime"},
        {"architecture": "cpu"},
        {"architecture": None},
        {"tensorrt": 11},
        {"compatibility": "version"},
        {"plugins": {"file": "../evil.so", "sha256": "0" * 64, "abi": ABI_VERSION}},
        {"plugins": {"file": "libkvc_plugins.so", "sha256": "0" * 63, "abi": ABI_VERSION}},
        {"plugins": {"file": "libkvc_plugins.so", "sha256": "0" * 64, "abi": True}},
        {"plugins": None},
        {"more": 1},
    ],
)
def test_an_invalid_target_is_refused(compiled, change):
    assert backend("tensorrt").target_problem(TARGET) is None
    with pytest.raises(InputError, match="was built for"):
        open_engine(compiled(**change))


def test_a_compiled_engine_is_replaced_whole(compiled, tiny_arguments):
    path = compiled()
    assert run([*tiny_arguments, "-o", str(path), "--force"]) == 0
    assert open_engine(path).backend == "onnxruntime"
    assert not (path / "decode.engine").exists()
    assert not (path / "inspector").exists()


def test_each_backend_requires_its_own_files():
    files = {name: each.required_files for name, each in backends().items()}
    assert files["onnxruntime"] == ("config.json", "weights.safetensors", "prefill.onnx", "decode.onnx")
    assert files["torch"] == files["onnxruntime"]
    assert "prefill.engine" in files["tensorrt"]
