"""config.json and manifest.json with any value replaced, sealed again with the right digests.

An engine whose digests fit is opened by whoever trusts it. Whatever its two descriptions say, opening, inspecting and
planning it works or is refused in one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.tensorrt_llm.llm_api_file import read_source
from kvc_trt.cli.commands import inspect
from kvc_trt.engine.manifest import SELF_DIGEST
from kvc_trt.engine.program import engine_program
from kvc_trt.errors import InputError
from tests.mutated_json import DROPPED, mutations, replaced

FILES = ("config.json", "manifest.json")


def written(document: Any) -> bytes:
    """Return the canonical form, and what is nearest to it for numbers that have none."""
    return json.dumps(document, sort_keys=True, indent=2).encode("ascii") + b"\n"


def write(engine: Path, name: str, document: dict[str, Any]) -> None:
    """Write a description, and the manifest that goes with it.

    The files get new names: those of a built engine are shared by tests."""
    content = written(document)
    manifest = document
    if name == "config.json":
        replace(engine / name, content)
        manifest = json.loads((engine / "manifest.json").read_bytes())
        manifest.pop(SELF_DIGEST)
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        if isinstance(section := document.get("build_config"), dict) and "kvc_trt" in section:
            manifest["build_config"] = section["kvc_trt"]
        content = written(manifest)
    digest = hashlib.sha256(content).hexdigest()
    replace(engine / "manifest.json", written({**manifest, SELF_DIGEST: digest}))


def replace(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


def read(path: Path) -> None:
    """Everything that reads the descriptions and needs no runtime."""
    engine = open_engine(path)
    program = engine_program(engine)
    assert program.dtype == "float32"
    assert len(program.limits.capacities) >= engine.model.num_hidden_layers
    assert program.largest_budget >= 0
    for layers, as_json in itertools.product((False, True), repeat=2):
        with contextlib.redirect_stdout(io.StringIO()):
            inspect.command.callback(path, layers, as_json)
    read_source(path)


def refusal(engine: Path, name: str, document: dict[str, Any]) -> str | None:
    """Return the reason why an engine with this document is refused; None if all works. Other errors reach the test."""
    write(engine, name, document)
    try:
        read(engine)
    except InputError as error:
        return error.message
    return None


def descriptions(engine: Path) -> dict[str, dict[str, Any]]:
    found = {name: json.loads((engine / name).read_bytes()) for name in FILES}
    found["manifest.json"].pop(SELF_DIGEST)
    return found


def outcomes(engine: Path, every: int) -> Counter[str]:
    """Count the outcomes of each `every`-th mutation of each description."""
    whole, counted = descriptions(engine), Counter[str]()
    for name, document in whole.items():
        for path, value in list(mutations(document))[::every]:
            try:
                message = refusal(engine, name, replaced(document, path, value))
            except Exception as error:
                shown = "left out" if value is DROPPED else ascii(value)[:60]
                raise AssertionError(f"{name}, {'.'.join(map(str, path))}: {shown}") from error
            counted["works" if message is None else "refused"] += 1
            assert message is None or ("\n" not in message and len(message) < 1000), message
        for other, unchanged in whole.items():
            write(engine, other, unchanged)
    read(engine)
    return counted


@pytest.mark.slow
def test_any_value_of_a_description_is_refused_in_one_line_or_harmless(tiny_engine):
    counted = outcomes(tiny_engine, every=29)
    assert counted["refused"] > 250
    assert counted["works"] < counted["refused"]


@pytest.mark.exhaustive
def test_every_value_of_the_descriptions_is_refused_in_one_line_or_harmless(tiny_engine):
    counted = outcomes(tiny_engine, every=1)
    assert counted["refused"] > 9_000
