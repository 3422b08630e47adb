"""No command writes into an engine, which would be refused from then on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run

COMMANDS = [
    ["export", "triton", "ENGINE", "-o", "ENGINE"],
    ["export", "triton", "ENGINE", "-o", "ENGINE/repository"],
    ["export", "dynamo", "ENGINE", "-o", "ENGINE/deployment"],
    ["export", "tensorrt-llm", "ENGINE", "-o", "ENGINE/layout"],
    ["export", "llm-api", "ENGINE", "-o", "ENGINE/options.yaml"],
    ["profile", "ENGINE", "-o", "ENGINE"],
    ["profile", "ENGINE", "--csv", "ENGINE/rows.csv"],
    ["profile", "ENGINE", "--png", "link/rows.png"],
    ["verify", "ENGINE", "-o", "ENGINE/report.json"],
    ["verify", "ENGINE", "--level", "tasks", "--output-dir", "ENGINE/tokenizer/tasks"],
    ["tune", "--model", "retrieval-tiny", "--data", "none", "--memory", "1MiB", "-o", "ENGINE"],
    ["context", "save", "ENGINE", "--prompt-ids", "ids.json", "-o", "ENGINE/context"],
    ["run", "ENGINE", "--prompt-ids", "ids.json", "--kv-proof", "digest", "-o", "ENGINE/proof.json"],
    ["tasks", "write", "associative-recall", "--target-tokens", "512", "-o", "ENGINE/recall.jsonl"],
    ["build", "--model", "retrieval-tiny", "--no-verify", "-o", "ENGINE/inner"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
def test_a_path_inside_an_engine_is_refused_before_any_work(
    command: list[str], tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tiny_engine)
    (tmp_path / "ids.json").write_text("[1, 2]")
    assert run([part.replace("ENGINE", str(tiny_engine)) for part in command]) == 2
    assert f"is in the engine {tiny_engine}, which another file would make invalid" in capfd.readouterr().err
    open_engine(tiny_engine)


def test_a_build_still_replaces_an_engine(tiny_engine: Path, tiny_arguments: list[str]) -> None:
    assert run([*tiny_arguments, "--max-output-len", "8", "--force", "-o", str(tiny_engine)]) == 0
    assert open_engine(tiny_engine).parameters.max_output_len == 8


def test_tables_of_policies_are_no_json(capsys) -> None:
    assert run(["policies", "--json", "--turns"]) == 2
    assert "give one of --json, --turns, --drafts and --kernels" in capsys.readouterr().err
