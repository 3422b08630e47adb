"""`kvc-trt doctor` as a user meets it, on this machine and for machines described by facts."""

from __future__ import annotations

import json

from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.probes import Probe
from kvc_trt.backends.registry import backend
from kvc_trt.cli.commands.doctor import describe
from kvc_trt.cli.main import run


def test_every_backend_says_what_it_needs_and_what_to_do(capsys):
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("reference", "onnxruntime", "openvino", "tensorrt", "tensorrt-llm", "torch"):
        assert f"\n{name}\n" in printed
    assert "  needs  TensorRT: expected 10.15 or newer, found not installed\n" in printed
    assert "  next   pip install 'kvc-trt[tensorrt]'\n" in printed


def test_doctor_json_has_the_same_facts(capsys, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, native.NONE)
    assert run(["doctor", "--json"]) == 0
    backends = {probe["name"]: probe for probe in json.loads(capsys.readouterr().out)["backends"]}
    tensorrt = backends["tensorrt"]
    assert not tensorrt["usable"]
    assert any(line.startswith("TensorRT: expected") for line in tensorrt["missing"])
    assert tensorrt["install"]
    assert backends["onnxruntime"]["usable"]
    assert backends["onnxruntime"]["install"] == []


def test_doctor_says_how_to_get_native_operators(monkeypatch, tmp_path):
    probe = backend("onnxruntime").probe
    monkeypatch.setenv(native.VARIABLE, native.NONE)
    assert probe().install == ()  # they are not wanted
    monkeypatch.delenv(native.VARIABLE)
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    monkeypatch.setattr(native, "_CHECKOUT", tmp_path)
    (tmp_path / "plugins_cpu").mkdir()
    assert probe().usable
    assert probe().install[0].startswith("make native; with a C++ compiler")
    (tmp_path / "plugins_cpu").rmdir()  # an installed wheel
    assert probe().install[0].startswith("pip install --force-reinstall --no-deps ., in kvc-trt's sources; with a C++")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libkvc_cpu.so").touch()
    assert native.how_to_get() is None


def test_a_backend_is_described_in_lines_of_found_needs_and_next():
    probe = Probe("x", "", False, {"gpu": "one"}, ("a driver: expected it, found none",), ("get one", "then look"))
    assert describe(probe).splitlines() == [
        "x",
        "  found  gpu one",
        "  needs  a driver: expected it, found none",
        "  next   get one",
        "  next   then look",
    ]
    assert describe(Probe("x", "", True, {}, (), ())).splitlines() == ["x", "  found  nothing"]
