"""model.yaml of TensorRT-LLM's own Triton model in the form that a user gets."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.backends.tensorrt_llm.llm_api import export_llm_api
from kvc_trt.backends.tensorrt_llm.llm_api_file import parse, read_source
from kvc_trt.backends.tensorrt_llm.triton_model_file import model_yaml
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.models.presets import build_configs_directory

CONFIG = build_configs_directory() / "llama3.1-8b-rocketkv.yaml"


@pytest.fixture(scope="module")
def export():
    found = read_source(CONFIG)
    return export_llm_api(found.model, found.parameters, max_batch_size=found.max_batch_size)


def test_the_model_file_is_the_export_with_tritons_settings(tmp_path, capfd):
    target = tmp_path / "model.yaml"
    command = [
        "export",
        "llm-api",
        str(CONFIG),
        "-o",
        str(target),
        "--triton-model",
        "meta-llama/Llama-3.1-8B-Instruct",
    ]
    assert run(command) == 0
    found = yaml.safe_load(target.read_text())
    assert found.pop("model") == "meta-llama/Llama-3.1-8B-Instruct"
    assert found.pop("triton_config") == {"max_batch_size": 0, "decoupled": True}
    capfd.readouterr()
    assert run(["export", "llm-api", str(CONFIG)]) == 0
    assert found == parse(capfd.readouterr().out).model_dump()
    assert "LLM_CONFIG_PATH" in target.read_text()


@pytest.mark.slow
@given(st.text(min_size=1))
def test_a_name_adds_nothing_but_itself(export, name):
    """Quotes, newlines, colons and so on are kept unchanged."""
    try:
        found = yaml.safe_load(model_yaml(export, source="x", model=name))
    except InputError:
        return
    assert found["model"] == name
    assert set(found) == {*export.configuration.model_dump(), "model", "triton_config"}


def test_an_empty_triton_model_name_is_refused(capfd):
    assert run(["export", "llm-api", str(CONFIG), "--triton-model", ""]) == 2
    assert "the model that Triton is to load" in capfd.readouterr().err
