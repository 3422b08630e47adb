"""Adding a method stays as short as docs/policies/README.md says: no other code knows a policy or kind by its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvc_trt
from kvc_trt.backends.registry import names
from kvc_trt.cli.commands.policies import engines
from kvc_trt.models.presets import build_configs_directory
from kvc_trt.policies import available, describe

PACKAGE = Path(kvc_trt.__file__).parent
PAGES = PACKAGE.parent / "docs" / "policies"
NAMES = [name for name, *_ in available()]
ORDINARY = {"none", "full", "dense", "recent"}
"""Kinds and a policy whose names are also words: another test sees that nobody asks for kinds."""


@pytest.fixture(scope="module")
def strings() -> dict[str, set[str]]:
    """Every string of every module outside of the methods, by file."""
    files = [path for path in PACKAGE.rglob("*.py") if "methods" not in path.parts]
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in files}
    return {
        file: {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for file, tree in trees.items()
    }


def test_only_methods_know_the_names_of_policies_and_kinds(strings: dict[str, set[str]]) -> None:
    kinds = {name for one in describe() for name in (one.prompt_eviction, one.decode_selection)}
    known = {*NAMES, *kinds} - ORDINARY
    assert {file: found for file, texts in strings.items() if (found := texts & known)} == {}


@pytest.mark.parametrize("field", ["prompt_eviction", "decode_selection"])
def test_nobody_else_reads_the_name_of_a_kind(field: str) -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "methods" not in path.parts]
    assert [path.name for path in files if field in path.read_text()] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_has_a_page(name: str) -> None:
    rows = [
        line for line in (PAGES / "README.md").read_text().splitlines() if line.startswith("|") and f"`{name}`" in line
    ]
    (page,) = re.findall(r"\]\((\S+\.md)\)", rows[0])
    assert name.removesuffix("-group") in (PAGES / page).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_policies_says_which_backends_have_engines(name: str) -> None:
    (row,) = [
        [cell.strip() for cell in line.split("|")]
        for line in (PAGES / "README.md").read_text().splitlines()
        if re.match(rf"\|[^|]*`{re.escape(name)}`", line)
    ]
    able = set(engines(name))
    every, bodies = set(names()), {"onnxruntime", "openvino", "torch"}
    texts = {frozenset(every): "all", frozenset(bodies): "no plugins", frozenset(): "none: oracles"}
    assert row[4] == texts[frozenset(able)]


@pytest.mark.parametrize("one", describe(), ids=lambda one: one.name)
def test_every_policy_with_an_engine_has_a_configuration(one) -> None:
    preset = one.name in ("rocketkv-v1", "rocketkv-v2") or one.decode_selection == "exact-topk"
    assert preset or (build_configs_directory() / f"retrieval-tiny-{one.name}.yaml").is_file()
