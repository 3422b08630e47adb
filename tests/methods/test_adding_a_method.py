"""Adding a method stays as short as docs/policies/README.md says: no other code knows a policy by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvc_trt
from kvc_trt.models.presets import build_configs_directory
from kvc_trt.policies import available, describe

PACKAGE = Path(kvc_trt.__file__).parent
PAGES = PACKAGE.parent / "docs" / "policies"
PUBLISHED = ("profile/compare.py", "accuracy/")
"""Compare with numbers that papers publish for some methods."""
NAMES = [name for name, *_ in available()]
COMPOSED = (
    "snapkv-gqa",
    "pyramidkv",
    "quest-matched",
    "h2o",
    "streaming-llm",
    "sliding-window",
    "duo-attention",
    "exact-topk-group",
)
"""Policies that are not called like a kind of eviction or selection."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name: path.read_text() for name, path in files.items() if not name.startswith(PUBLISHED)}


@pytest.mark.parametrize("name", COMPOSED)
def test_only_its_own_file_knows_a_policys_name(name: str, sources: dict[str, str]) -> None:
    (file,) = [file for file, text in sources.items() if f'"{name}"' in text]
    assert file.startswith("methods/")


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_has_a_page(name: str) -> None:
    rows = [
        line for line in (PAGES / "README.md").read_text().splitlines() if line.startswith("|") and f"`{name}`" in line
    ]
    (page,) = re.findall(r"\]\((\S+\.md)\)", rows[0])
    assert name.removesuffix("-group") in (PAGES / page).read_text()


@pytest.mark.parametrize("one", describe(), ids=lambda one: one.name)
def test_every_policy_with_an_engine_has_a_configuration(one) -> None:
    preset = one.name in ("rocketkv-v1", "rocketkv-v2") or one.decode_selection == "exact-topk"
    assert preset or (build_configs_directory() / f"retrieval-tiny-{one.name}.yaml").is_file()
