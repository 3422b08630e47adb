"""Plan, inspect and run compare a row's whole state, of sliding and linear layers too, with what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvc_trt.cli.main import run
from tests.oracles.family_models import written

LENGTHS = ("--max-input-len", "256", "--max-output-len", "32", "--token-budget", "64")
WHOLE = {
    # Keys and values of a full layer's tokens and of three windows.
    "gemma3": (288 + 3 * 64) * 2 * 2 * 16 * 4,
    # One full layer; last inputs and memory of three others.
    "qwen3-next": 288 * 2 * 2 * 32 * 4 + 3 * (3 * 96 + 4 * 16 * 8) * 4,
}
"""Bytes of one row of 288 tokens in float32, from the shapes in tests/oracles/family_models.py."""


def shown(capfd, *arguments: str) -> dict:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_state_counts_windows_and_linear_layers(name: str, tmp_path: Path, capfd) -> None:
    pytest.importorskip("transformers")
    checkpoint, engine = str(tmp_path / "checkpoint"), str(tmp_path / "engine")
    written(name, Path(checkpoint))
    planned = shown(capfd, "plan", "--model", checkpoint, "--weights", "fp32", *LENGTHS)["cache"]
    assert run(["build", "--model", checkpoint, *LENGTHS, "--no-verify", "-o", engine]) == 0
    capfd.readouterr()
    inspected = shown(capfd, "inspect", engine)
    assert planned["full_bytes_per_row"] == inspected["full_state_bytes_per_row"] == WHOLE[name]
    assert planned["compressed_bytes_per_row"] <= inspected["state_bytes_per_row"] < WHOLE[name]
    assert run(["inspect", engine]) == 0
    ratio = WHOLE[name] / inspected["state_bytes_per_row"]
    assert f"({ratio:.2f}x)" in capfd.readouterr().out

    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([3 + number % 50 for number in range(256)]))
    answer = shown(capfd, "run", engine, "--prompt-ids", str(prompt), "--max-new-tokens", "32", "--ignore-eos")
    (row,) = answer["outputs"]
    assert row["cache"]["bytes"] < row["cache"]["full_bytes"] <= WHOLE[name]
