"""Layer budgets that a build measures: recorded in the engine, and refused where there is nothing to measure on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvc_trt.cli.main import run
from kvc_trt.engine.configuration import EngineConfig
from kvc_trt.errors import InputError
from kvc_trt.methods.base.layer_budget import DEFAULT_SHARE
from kvc_trt.reference.model.squeeze import groups, squeeze
from kvc_trt.tasks.kinds.key_value import generate

BUILD = ["build", "--model", "retrieval-tiny", "--policy", "snapkv-gqa", "--token-budget", "192", "--no-verify"]
SQUEEZE = [*BUILD, "--layer-budget", "squeeze"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    lines = [generate(seed=1, index=i, context_tokens=200, pairs=8).prompt_text for i in range(2)]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_measured_budgets_are_recorded_and_replayed(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, again = tmp_path / "engine", tmp_path / "again"
    assert run([*SQUEEZE, "--set", f"calibration={prompts}", "-o", str(engine)]) == 0
    config = json.loads((engine / "config.json").read_text())
    budgets = config["kv_compression"]["parameters"]["layer_budgets"]
    assert sum(budgets) == 3 * 128
    assert len(set(budgets)) > 1
    assert config["build_config"]["kvc_trt"]["layer_budgets"] == budgets
    slots = [t["shape"][1] for t in config["kv_compression"]["state"] if t["name"].startswith("k_cache")]
    assert slots == [budget + 64 for budget in budgets]
    _check_cosines(engine, config["build_config"]["kvc_trt"]["layer_cosines"], budgets)
    prompts.unlink()  # what was measured is not measured again
    assert run(["build", "--config", str(engine / "config.json"), "--no-verify", "-o", str(again)]) == 0
    assert json.loads((again / "config.json").read_text())["kv_compression"] == config["kv_compression"]
    assert json.loads((again / "config.json").read_text())["build_config"]["kvc_trt"]["layer_cosines"]
    _check_shown(engine, capsys)


def _check_cosines(engine: Path, cosines: list[float], budgets: list[int]) -> None:
    """Check that the record gives the budgets. A file without one, as in earlier builds, is valid; a cut one is not."""
    assert all(-1 < one < 1 for one in cosines)
    assert list(squeeze(cosines, 128, share=DEFAULT_SHARE, minimum=32, maximum=512).budgets) == budgets
    path = engine / "config.json"
    found = json.loads(path.read_text())
    stored = found["build_config"]["kvc_trt"]
    stored["layer_cosines"] = cosines[:-1]
    with pytest.raises(InputError, match="layer_cosines has 2 numbers; expected 3, one per layer"):
        EngineConfig.parse(json.dumps(found).encode(), path)
    del stored["layer_cosines"]
    assert EngineConfig.parse(json.dumps(found).encode(), path).parameters.layer_budgets == tuple(budgets)


def _check_shown(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect --layers` shows a layer's cosine, group, budget, slots and bytes."""
    capsys.readouterr()
    assert run(["inspect", str(engine), "--layers", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    build, layers = answer["build_config"]["kvc_trt"], answer["layers"]
    assert [one["cosine"] for one in layers] == build["layer_cosines"]
    assert [one["group"] for one in layers] == list(groups(build["layer_cosines"]))
    assert [one["caches"][0]["budget"] for one in layers] == build["layer_budgets"]
    assert [one["caches"][0]["slots"] for one in layers] == [budget + 64 for budget in build["layer_budgets"]]
    assert sum(one["bytes_per_row"] for one in layers) == answer["state_bytes_per_row"]
    assert {one["attention"] for one in layers} == {"full"}
    assert run(["inspect", str(engine), "--layers"]) == 0
    shown = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in shown if line.split()[:1] == ["1"])
    kept = build["layer_budgets"][1]
    assert row[1:6] == ["full", f"{build['layer_cosines'][1]:.4f}", f"G{layers[1]['group']}", str(kept), str(kept + 64)]


def test_recorded_cosines_are_divided_anew_without_a_measurement(tmp_path: Path) -> None:
    settings = ["--set", "layer_cosines=[0.2, 0.9, 0.5]"]
    assert run([*SQUEEZE, *settings, "-o", str(tmp_path / "engine")]) == 0
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert config["kv_compression"]["parameters"]["layer_budgets"] == [170, 44, 170]  # 44 = 0.35 * 128


def test_cosines_that_each_prompt_measures_are_said_to_be_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    assert run([*BUILD, "--layer-budget", "squeeze-online", "-o", str(engine)]) == 0
    capsys.readouterr()
    assert run(["inspect", str(engine), "--layers"]) == 0
    shown = capsys.readouterr().out
    assert "cosines and budgets: each prompt's own (--layer-budget squeeze-online)" in shown
    assert shown.count("each prompt's") == 2 * 3 + 1
    assert run(["inspect", str(engine), "--layers", "--json"]) == 0
    assert {one["caches"][0]["budget"] for one in json.loads(capsys.readouterr().out)["layers"]} == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BUILD, "--set", "layer_cosines=[0.1, 0.2, 0.3]"], "layer_cosines has no use without --layer-budget squeeze"),
        ([*SQUEEZE, "--set", "layer_cosines=[0.1, 0.2]"], "layer_cosines has 2 numbers; expected 3, one per layer"),
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
