"""The environment of Dynamo's processes."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import pytest

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.serving.dynamo import environment
from kvc_trt.serving.dynamo.environment import ON_THIS_MACHINE, process_environment, require_dynamo


def test_nobody_can_be_talked_into_leaving_this_machine():
    outward = dict.fromkeys(ON_THIS_MACHINE, "0.0.0.0") | {"HOME": "/root", "DYN_NAMESPACE": "theirs"}
    found = process_environment(Path("/store"), outward)
    assert {name: found[name] for name in ON_THIS_MACHINE} == ON_THIS_MACHINE
    assert found["HOME"] == "/store/home"
    assert found["DYN_FILE_KV"] == "/store/found"
    assert "DYN_NAMESPACE" not in found


def test_the_api_key_stays_in_the_gateway():
    assert "KVC_TRT_API_KEY" not in process_environment(Path("/store"), {"KVC_TRT_API_KEY": "of mine"})


def test_harmless_variables_are_the_users_choice():
    assert process_environment(Path("/store"), {"DYN_LOG": "debug"})["DYN_LOG"] == "debug"
    assert process_environment(Path("/store"), {})["DYN_LOG"] == "warn"


def test_without_dynamo_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedEnvironment) as raised:
        require_dynamo()
    assert "make dynamo-env" in str(raised.value.hint)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: "1.6.1")
    with pytest.raises(UnsupportedEnvironment, match=f"1.6.1 is installed, expected {environment.DYNAMO_VERSION}"):
        require_dynamo()


def test_the_version_is_that_of_the_extra():
    import re

    from tests.serving.dynamo.served import ROOT

    pinned = re.findall(r'"ai-dynamo==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned == [environment.DYNAMO_VERSION]


def test_the_version_of_nixl_is_that_of_the_environment():
    import re

    from tests.serving.dynamo.served import ROOT

    assert re.findall(r"nixl-cu12==([\d.]+)", (ROOT / "Makefile").read_text()) == [environment.NIXL_VERSION]
