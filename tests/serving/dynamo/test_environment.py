"""The environment of Dynamo's processes."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.serving.dynamo import environment
from kvc_trt.serving.dynamo.environment import ON_THIS_MACHINE, process_environment, require_dynamo
from tests.serving.dynamo.served import ROOT


def test_outside_variables_cannot_make_a_process_leave_this_machine():
    outward = dict.fromkeys(ON_THIS_MACHINE, "0.0.0.0") | {"HOME": "/root", "DYN_NAMESPACE": "theirs"}
    found = process_environment(Path("/store"), outward)
    assert {name: found[name] for name in ON_THIS_MACHINE} == ON_THIS_MACHINE
    assert found["HOME"] == "/store/home"
    assert found["DYN_FILE_KV"] == "/store/found"
    assert "DYN_NAMESPACE" not in found


def test_the_api_key_stays_in_the_gateway():
    assert "KVC_TRT_API_KEY" not in process_environment(Path("/store"), {"KVC_TRT_API_KEY": "of mine"})


def test_the_user_may_set_the_log_level():
    assert process_environment(Path("/store"), {"DYN_LOG": "debug"})["DYN_LOG"] == "debug"
    assert process_environment(Path("/store"), {})["DYN_LOG"] == "warn"


def test_without_dynamo_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedEnvironment) as raised:
        require_dynamo()
    assert "make dynamo-env" in str(raised.value.hint)


def test_another_version_of_dynamo_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: "1.4.2")
    with pytest.raises(UnsupportedEnvironment, match=f"1.4.2 is installed, expected {environment.DYNAMO_VERSION}"):
        require_dynamo()


@pytest.mark.parametrize(
    ("file", "package", "version"),
    [
        ("pyproject.toml", "ai-dynamo-runtime", environment.DYNAMO_VERSION),
        ("Makefile", "ai-dynamo", environment.DYNAMO_VERSION),
        ("Makefile", "nixl-cu12", environment.NIXL_VERSION),
    ],
)
def test_required_versions_equal_those_that_make_installs(file, package, version):
    assert re.findall(rf"\b{package}==([\d.]+)", (ROOT / file).read_text()) == [version]
