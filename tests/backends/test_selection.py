from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvc_trt.backends import onnxruntime, probes
from kvc_trt.backends.probes import Probe
from kvc_trt.backends.registry import backend, select_backend
from kvc_trt.backends.tensorrt import machine
from kvc_trt.backends.tensorrt.machine import Gpu, GpuMachine
from kvc_trt.backends.tensorrt.plugins import PluginLibrary
from kvc_trt.backends.tensorrt_llm import builder_api
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.kernels.structs import ABI_VERSION


def fake(monkeypatch, name, *, usable, missing=()):
    probe = Probe(name, "", usable, {name: "9.9"}, tuple(missing), ("install it",) if missing else ())
    monkeypatch.setattr(backend(name), "probe", lambda: probe)


def test_auto_says_what_it_took_and_why():
    chosen = select_backend("auto")
    assert chosen.name == "onnxruntime"
    assert chosen.reason == "the first that can run here; kvc-trt doctor shows all"


def test_auto_prefers_tensorrt_where_it_runs(monkeypatch):
    fake(monkeypatch, "tensorrt", usable=True)
    assert select_backend("auto").name == "tensorrt"


def test_auto_without_any_backend_names_the_way_out(monkeypatch):
    fake(monkeypatch, "onnxruntime", usable=False, missing=["everything"])
    with pytest.raises(UnsupportedEnvironment, match="everything") as caught:
        select_backend("auto")
    assert caught.value.hint == "install it"


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'onnxruntime'"):
        select_backend("onnx-runtime")


@pytest.mark.parametrize("command", ["build", "plan"])
def test_an_unknown_backend_in_a_file_is_an_error_too(command, tmp_path, capfd):
    (tmp_path / "build.yaml").write_text("model: retrieval-tiny\nbackend: onnx-runtime\n")
    assert run([command, "--config", str(tmp_path / "build.yaml")]) == 2
    assert "unknown backend 'onnx-runtime'; did you mean 'onnxruntime'?" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "oldest"), [("tensorrt", "10.15"), ("tensorrt-llm", "10.14")])
def test_backends_that_cannot_run_here_are_never_chosen(name, oldest):
    said = f"TensorRT: expected {re.escape(oldest)} or newer, found not installed"
    with pytest.raises(UnsupportedEnvironment, match=said) as caught:
        select_backend(name)
    assert "pip install" in caught.value.hint


def test_the_tensorrt_of_tensorrt_llm_needs_no_parser(monkeypatch):
    """tensorrt_llm 1.2.1 pins TensorRT 10.14, which has plugins and attention, but cannot read our graphs."""
    gpu = Gpu("NVIDIA H200", (9, 0), 140 << 30, 139 << 30)
    library = PluginLibrary("plugins", Path("/opt/libkvc_plugins.so"), "ab" * 32, ABI_VERSION, "cuda")
    here = GpuMachine("10.14.1.48", None, (13, 0), None, (13, 0), gpu, None, (library,))
    monkeypatch.setattr(machine, "inspect_machine", lambda: here)
    monkeypatch.setattr(builder_api, "installed", {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}.get)
    assert backend("tensorrt-llm").probe().usable
    assert backend("tensorrt").probe().missing == ("TensorRT: expected 10.15 or newer, found 10.14.1.48",)


def test_listing_the_backends_imports_none_of_their_libraries():
    listed = "import sys; from kvc_trt.backends.registry import backends; backends(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True, timeout=120)
    assert not {"torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_llm"} & {*done.stdout.split()}


def test_torch_says_where_it_runs():
    chosen = select_backend("torch")
    assert chosen.versions["runs on"].startswith("the CPU, slowly")


def test_an_old_onnxruntime_is_unusable(monkeypatch):
    monkeypatch.setattr(onnxruntime.backend, "import_package", lambda package: ({package: "1.22.0"}, ()))
    probe = backend("onnxruntime").probe()
    assert not probe.usable
    assert probe.missing == ("onnxruntime 1.23 or newer, found 1.22.0",)


def test_a_package_that_does_not_load_is_reported_with_its_reason(monkeypatch):
    def broken(name):
        raise ImportError("libfoo.so: cannot open\nshared object")

    monkeypatch.setattr(probes.importlib, "import_module", broken)
    probe = backend("onnxruntime").probe()
    assert not probe.usable
    assert "installed, but does not load: libfoo.so: cannot open shared object" in probe.missing[0]


@pytest.mark.parametrize(("answer", "gpu"), [("NVIDIA H200, 580.1\n", "NVIDIA H200, 580.1"), ("", None)])
def test_a_gpu_is_found_through_its_driver(monkeypatch, answer, gpu):
    monkeypatch.setattr(probes.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    done = subprocess.CompletedProcess([], 0, stdout=answer)
    monkeypatch.setattr(probes.subprocess, "run", lambda *arguments, **options: done)
    probe = backend("tensorrt").probe()
    assert probe.versions.get("gpu") == gpu
    assert not probe.usable


def test_a_driver_that_hangs_counts_as_no_gpu(monkeypatch):
    def hang(*arguments, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(probes.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(probes.subprocess, "run", hang)
    assert "gpu" not in backend("torch").probe().versions
