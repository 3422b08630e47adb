"""Layer budgets that a build measures: recorded in the engine, and refused where there is nothing to measure on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvc_trt.cli.main import run
from kvc_trt.tasks.key_value import generate

BUILD = ["build", "--model", "retrieval-tiny", "--policy", "snapkv-gqa", "--token-budget", "192", "--no-verify"]
SQUEEZE = [*BUILD, "--layer-budget", "squeeze"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    lines = [generate(seed=1, index=i, context_tokens=200, pairs=8).prompt_text for i in range(2)]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_measured_budgets_are_recorded_and_replayed(prompts: Path, tmp_path: Path) -> None:
    engine, again = tmp_path / "engine", tmp_path / "again"
    assert run([*SQUEEZE, "--set", f"calibration={prompts}", "-o", str(engine)]) == 0
    config = json.loads((engine / "config.json").read_text())
    budgets = config["kv_compression"]["parameters"]["layer_budgets"]
    assert sum(budgets) == 3 * 128
    assert len(set(budgets)) > 1
    assert config["build_config"]["kvc_trt"]["layer_budgets"] == budgets
    slots = [t["shape"][1] for t in config["kv_compression"]["state"] if t["name"].startswith("k_cache")]
    assert slots == [budget + 64 for budget in budgets]
    prompts.unlink()  # what was measured is not measured again
    assert run(["build", "--config", str(engine / "config.json"), "--no-verify", "-o", str(again)]) == 0
    assert json.loads((again / "config.json").read_text())["kv_compression"] == config["kv_compression"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SQUEEZE, "cannot spell any of the tasks"),
        ([*SQUEEZE, "--set", "calibration=nowhere.txt"], "cannot read nowhere.txt"),
        ([*SQUEEZE, "--set", "calibration=empty.txt"], "has no prompt"),
        ([*BUILD, "--set", "squeeze_share=0.5"], "no use without --layer-budget"),
        ([*BUILD, "--set", "calibration=/dev/null"], "calibration has no use without --layer-budget squeeze"),
        ([*SQUEEZE, "--set", f"calibration={__file__}"], "is an unknown token of the model's tokenizer"),
    ],
)
def test_calibrations_that_cannot_be_measured_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n")
    assert run([*arguments, "-o", "engine"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()
