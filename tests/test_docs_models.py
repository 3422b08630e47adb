"""The table of docs/models.md: one line for each family, which says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.backends.registry import backends
from kvc_trt.backends.tensorrt.lowering import PLUGINS, lower
from kvc_trt.engine.supported import supporting
from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import families
from kvc_trt.models.sharding import shards
from tests.backends.tensorrt.weightless import weightless_graphs
from tests.graph.small_models import resolve
from tests.oracles.family_models import MODELS, our_config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BACKENDS = {
    "ONNX Runtime": "onnxruntime",
    "OpenVINO": "openvino",
    "torch": "torch",
    "TensorRT": "tensorrt",
    "TensorRT-LLM": "tensorrt-llm",
}
BY_CLASS = {f"{prefix}ForCausalLM": name for name, (prefix, _) in reversed(MODELS.items())}
"""The first model of each architecture in the table of tests."""


def rows() -> dict[str, list[str]]:
    """Return the cells of the page's lines, by the class in the first one."""
    found = [line for line in PAGE.read_text().splitlines() if "ForCausalLM" in line and line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_there_is_one_line_for_each_family_and_one_model_in_the_tests() -> None:
    """`tests/oracles/test_families.py` runs the models on ONNX Runtime, OpenVINO and torch."""
    assert rows().keys() == families().keys() == BY_CLASS.keys()


@pytest.mark.parametrize("architecture", families())
def test_a_line_names_the_backends_that_run_its_family(architecture: str) -> None:
    model, gguf = our_config(BY_CLASS[architecture]), families()[architecture].gguf
    expected = {
        **{title: _said(_is_built(model, name)) for title, name in BACKENDS.items()},
        "--tp": _said(_is_divided(model)),
        "GGUF": "no" if gguf is None else ", ".join(f"`{name}`" for name in gguf.names),
    }  # fmt: skip
    found = dict(zip(expected, rows()[architecture][1:], strict=True))
    assert found == expected


@pytest.mark.parametrize("architecture", families())
def test_the_lowering_takes_the_models_that_the_backend_is_said_to_take(architecture: str) -> None:
    model = our_config(BY_CLASS[architecture])
    assert _is_lowered(model) == _is_built(model, "tensorrt")


def _said(able: bool) -> str:
    return "yes" if able else "no"


def _is_built(model: ModelConfig, backend: str) -> bool:
    """`tests/oracles/test_families.py` has the answers of those that are."""
    return backend in supporting(resolve("rocketkv", model), model, backends())


def _is_lowered(model: ModelConfig) -> bool:
    """Ask the lowering of all three graphs."""
    try:
        for graph in weightless_graphs(model, resolve("rocketkv", model), "bf16"):
            lower(graph, tensorrt=(11, 4), plugins=PLUGINS)
    except InputError:
        return False
    return True


def _is_divided(model: ModelConfig) -> bool:
    try:
        return len(shards(model, 2)) == 2
    except InputError:
        return False
