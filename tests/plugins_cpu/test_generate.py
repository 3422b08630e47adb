"""The generated tables are current, and cover every operator that the library computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvc_trt.operators import registry
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.native import interface
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.schema import CACHE, FLOAT16, Tensor
from plugins_cpu import generate

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_files_are_current() -> None:
    for path, text in generate.generated().items():
        name = path.relative_to(ROOT)
        assert path.read_text() == text, f"{name} is out of date: run `python -m plugins_cpu.generate`"
        assert "python -m plugins_cpu.generate" in text.splitlines()[0]


def test_an_operator_reaches_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = Tensor("sinks", CACHE, ("H", "Z/2"))
    changed = replace(DENSE_ATTENTION, inputs=(*DENSE_ATTENTION.inputs, sinks))
    monkeypatch.setattr(generate, "OPERATORS", {**OPERATORS, changed.name: changed})
    text = generate.schemas_header()
    assert "kSymbolZOver2,  ///< Z/2" in text
    assert '{"sinks", ort::ElementType::kFloat, false, kShape_H_ZOver2}' in text
    assert '"KvcDenseAttention_k8v4"' in text
    assert 'inline constexpr Schema kKvcDenseAttention[] = {{"KvcDenseAttention", ' in text


def test_the_tables_have_what_the_library_computes_and_no_more() -> None:
    names = {operator.name for operator in generate.implemented()}
    assert {"KvcDenseAttention", "KvcPrefillAttention", "KvcQuantisedLinear"} <= names < OPERATORS.keys()


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": DENSE_ATTENTION.outputs[::-1]},
        {"inputs": (replace(DENSE_ATTENTION.inputs[0], element=FLOAT16), *DENSE_ATTENTION.inputs[1:])},
        {"attributes": (replace(DENSE_ATTENTION.attributes[0], name="renamed"),)},
    ],
)
def test_a_library_built_before_a_schema_changed_is_another_interface(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    before = interface()
    assert f"kInterface = {before};" in generate.schemas_header()
    changed = replace(DENSE_ATTENTION, **change)
    monkeypatch.setattr(registry, "OPERATORS", {**OPERATORS, changed.name: changed})
    assert interface.__wrapped__() != before
