"""`kvc-trt doctor` as a user meets it, on this machine and for machines described by facts."""

from __future__ import annotations

import json

from kvc_trt.backends.probes import Probe
from kvc_trt.cli.doctor import describe
from kvc_trt.cli.main import run


def test_every_backend_says_what_it_needs_and_what_to_do(capsys):
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("reference", "onnxruntime", "openvino", "tensorrt", "tensorrt-llm", "torch"):
        assert f"\n{name}\n" in printed
    assert "  needs  TensorRT: expected 10.15 or newer, found not installed\n" in printed
    assert "  next   pip install 'kvc-trt[tensorrt]'\n" in printed


def test_json_has_the_same_facts(capsys):
    assert run(["doctor", "--json"]) == 0
    backends = {probe["name"]: probe for probe in json.loads(capsys.readouterr().out)["backends"]}
    tensorrt = backends["tensorrt"]
    assert not tensorrt["usable"]
    assert any(line.startswith("TensorRT: expected") for line in tensorrt["missing"])
    assert tensorrt["install"]
    assert backends["onnxruntime"]["usable"]
    assert backends["onnxruntime"]["install"] == []


def test_a_backend_in_lines():
    probe = Probe("x", "", False, {"gpu": "one"}, ("a driver: expected it, found none",), ("get one", "then look"))
    assert describe(probe).splitlines() == [
        "x",
        "  found  gpu one",
        "  needs  a driver: expected it, found none",
        "  next   get one",
        "  next   then look",
    ]
    assert describe(Probe("x", "", True, {}, (), ())).splitlines() == ["x", "  found  nothing"]
