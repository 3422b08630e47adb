"""Versions of TensorRT-LLM that can build engines, and messages about absent, too new or broken ones."""

from __future__ import annotations

import importlib

import pytest

from kvc_trt.backends.tensorrt_llm import builder_api
from kvc_trt.backends.tensorrt_llm.layers import add_plugin
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from tests.backends.tensorrt_llm.evaluator import Registry, evaluator


@pytest.fixture
def installed(monkeypatch):
    """installed(tensorrt_llm="1.2.1", ...) sets the versions in the package metadata."""

    def say(**versions):
        monkeypatch.setattr(builder_api, "installed", versions.get)

    return say


@pytest.mark.parametrize("version", ["0.9.0", "0.21.0", "1.0.0", "1.1.0rc5", "1.2.0", "1.2.1", "1.2.0.post1"])
def test_versions_with_the_builder_are_accepted(version, installed):
    installed(tensorrt_llm=version, tensorrt="10.14.1")
    assert builder_api.probe().missing == ()


@pytest.mark.parametrize("version", ["1.3.0", "1.3.0rc26", "1.4.0rc1", "2.0", "unknown", ""])
def test_versions_without_the_builder_are_refused_with_alternatives(version, installed):
    installed(tensorrt_llm=version, tensorrt="10.14.1")
    with pytest.raises(UnsupportedEnvironment) as caught:
        builder_api.load_builder_api()
    assert caught.value.exit_code == 3
    for part in (f"found {version} ", "1.2.x or older", "July 2026", "removal"):
        assert part in caught.value.message
    for part in ("--backend tensorrt", "export llm-api"):
        assert part in caught.value.hint


def test_a_missing_tensorrt_llm_names_the_command_that_installs_it(installed):
    installed()
    with pytest.raises(UnsupportedEnvironment, match=r"needs Python package tensorrt_llm 1\.2\.x") as caught:
        builder_api.load_builder_api()
    assert "pip install 'tensorrt_llm==1.2.1'" in caught.value.hint


def test_a_broken_tensorrt_llm_shows_its_import_error(installed, monkeypatch):
    installed(tensorrt_llm="1.2.1", tensorrt="10.14.1")

    def fail(name):
        raise OSError("libmpi.so.40:\ncannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(UnsupportedEnvironment, match=r"does not load: libmpi\.so\.40: cannot open"):
        builder_api.load_builder_api()


def test_a_probe_imports_nothing(installed, monkeypatch):
    installed(tensorrt_llm="1.2.1", tensorrt="10.14.1")
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    assert builder_api.probe() == builder_api.Facts({"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1"}, (), None)
    installed(tensorrt_llm="1.2.1")
    assert builder_api.probe().missing == ("Python package tensorrt",)


def test_attributes_that_a_plugin_refuses_are_named():
    registry = Registry()
    registry.get_creator = lambda *arguments: type("Creator", (), {"create_plugin": lambda *_: None})()
    api, *_ = evaluator({}, registry)
    with pytest.raises(UnsupportedEnvironment, match=r"KvcDenseAttention refuses \{'dense_until': -1\}"):
        add_plugin(api, DENSE_ATTENTION, {}, {"dense_until": -1})
