"""The generated C++ is current, and changes of the schemas reach every file."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvc_trt.kernels.rotated import LIBRARY_OPERATORS
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.dimensions import SIZES, evaluate
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import CACHE, Attribute, Kernel, Operator, Tensor
from plugins_cuda import generate
from plugins_cuda.generate import header, plugins, validation
from plugins_cuda.generate.formulas import expression

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_files_are_current() -> None:
    for path, text in generate.generated().items():
        name = path.relative_to(ROOT)
        assert path.read_text() == text, f"{name} is out of date: run `python -m plugins_cuda.generate`"


def test_no_generated_file_outlives_its_operator() -> None:
    folder = generate.PLUGINS / "tensorrt" / "operators"
    assert set(folder.iterdir()) == {path for path in generate.generated() if path.parent == folder}


def test_every_generated_file_says_where_it_comes_from() -> None:
    for text in generate.generated().values():
        assert "python -m plugins_cuda.generate" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("formula", "written"),
    [
        ("(C + page_size - 1) // page_size", "(C + page_size - 1) / page_size"),
        ("2 * D", "2 * D"),
        ("C - (D - 1)", "C - (D - 1)"),
        ("(C - D) - 1", "C - D - 1"),
        ("2 * (C + D) // (D * C)", "2 * (C + D) / (D * C)"),
        ("max(top_k, min(C, 4) + 1)", "std::max({top_k, std::min({C, 4}) + 1})"),
        ("stored_pages(C + 1, page_size, 2)", "stored_pages(C + 1, page_size, 2)"),
    ],
)
def test_formulas_are_translated_to_c(formula: str, written: str) -> None:
    assert expression(formula) == written


def test_translated_divisions_equal_python_floor_division() -> None:
    """Holds for whole numbers that are not negative, as all sizes are."""
    formula = "(C + page_size - 1) // page_size - (C - 3) * 2"
    for capacity in (3, 16, 17):
        values = {"C": capacity, "page_size": 4}
        assert eval(expression(formula).replace("/", "//"), {}, values) == evaluate(formula, values)


def test_formulas_that_are_not_allowed_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be written in C"):
        expression("abs(C)")


def _window_attention() -> Operator:
    """Return a throw-away operator with a kernel, a new attribute and a tensor of its own."""
    return replace(
        HYBRID_ATTENTION,
        name="KvcWindowAttention",
        inputs=(*HYBRID_ATTENTION.inputs, Tensor("sinks", CACHE, ("H",), "one logit per head")),
        attributes=(
            *HYBRID_ATTENTION.attributes,
            Attribute("window_slots", 3, 4095, bits=32, odd=True, at_most="top_k"),
        ),
        kernel=Kernel("kvc_window_attention", "KvcWindowAttentionParams"),
    )


def _add(monkeypatch: pytest.MonkeyPatch, operator: Operator) -> None:
    """Adds an operator to those with plugins, and so to those of the kernel libraries."""
    monkeypatch.setattr(plugins, "KERNEL_OPERATORS", (*KERNEL_OPERATORS, operator))
    for module in (header, validation):
        monkeypatch.setattr(module, "LIBRARY_OPERATORS", (*LIBRARY_OPERATORS, operator))


def test_an_operator_reaches_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    _add(monkeypatch, _window_attention())
    texts = {path.name: text for path, text in generate.generated().items()}
    for text in ("} KvcWindowAttentionParams;", "const void* sinks;", "[H], one logit per head", "odd, in 3..top_k"):
        assert text in texts["parameters.h"]
    for text in ('make.input("sinks", p.sinks, {p.heads})', 'check_odd("window_slots", p.window_slots)'):
        assert text in texts["parameter_rules.h"]
    assert '{"window_slots", p.window_slots, 3, p.top_k, "top_k"}' in texts["parameter_rules.h"]
    assert "kMaxFields = 9" in texts["dimensions.h"]
    for text in (
        '{"sinks", kCache, {kHeads}}',
        '.odd = true, .at_most = "top_k"}',
        "params.sinks = buffers.inputs[11];",
        'params.window_slots = call.fields.get("window_slots");',
        "return kvc_window_attention(&params",
        "Operator kWindowAttention = {",
        '"KvcWindowAttention", kFields',
    ):
        assert text in texts["window_attention.cpp"]
    assert "&kWindowAttention}" in texts["operators.h"]


def test_the_struct_and_the_checks_of_an_operator_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _add(monkeypatch, _window_attention())
    for path, text in generate.generated().items():
        copy = tmp_path / path.relative_to(generate.PLUGINS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    source = tmp_path / "uses.cpp"
    source.write_text(
        '#include "src/parameter_rules.h"\n'
        "void use(const KvcWindowAttentionParams& p) {\n"
        "    kvc::checks::check_numbers(p);\n    kvc::checks::check_memory(kvc::checks::tensors_of(p));\n}\n"
    )
    folders = (tmp_path, tmp_path / "include", generate.PLUGINS, generate.PLUGINS / "include")
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
    command += [f"-I{folder}" for folder in folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_symbol_has_a_dimension() -> None:
    text = plugins.dimensions_header()
    assert all(f'"{size.words}"' in text for size in SIZES.values())
    assert f"kDims = {len(SIZES)};" in text
