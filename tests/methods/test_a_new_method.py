"""A method of new kinds is one file: dropped into the package, every command knows it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import kvc_trt.methods
from kvc_trt import policies
from kvc_trt.backends.opening import harness_for, open_engine
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.cli.main import run
from kvc_trt.engine import EngineDirectory
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import observe
from kvc_trt.verify.rankings.index_lists import IndexComparison
from kvc_trt.verify.reference_run import Judging, KnownRun, can_judge, reference_run, replay
from kvc_trt.verify.thresholds import thresholds_for

NAME = "long-keys"
FILE = Path(__file__).parent / "throwaway.py"
PROMPT = np.where(np.arange(100) % 5, 4, 3)
"""Twenty copies of the token with the longer keys, by the weights of seed 0, and eighty of another one."""
LENGTHS = ["--token-budget", "32", "--max-input-len", "128", "--max-output-len", "16"]


@pytest.fixture
def dropped_in(tmp_path, monkeypatch):
    """The one file in a folder that the package looks into; nothing is registered."""
    folder = tmp_path / "methods"
    folder.mkdir()
    shutil.copy(FILE, folder / "long_keys.py")
    monkeypatch.setattr(kvc_trt.methods, "__path__", [*kvc_trt.methods.__path__, str(folder)])
    yield folder / "long_keys.py"
    sys.modules.pop("kvc_trt.methods.long_keys", None)
    monkeypatch.delattr(kvc_trt.methods, "long_keys", raising=False)


def test_a_new_method_is_unknown_without_its_file():
    assert NAME not in [one.name for one in policies.describe()]


def test_policies_and_plan_list_it(dropped_in, tiny_model, capsys):
    assert run(["policies", "--json"]) == 0
    (entry,) = [one for one in json.loads(capsys.readouterr().out)["policies"] if one["name"] == NAME]
    kinds = entry["prompt_eviction"], entry["decode_selection"]
    assert (kinds, entry["engines"]) == (("long-keys", "newest"), ["onnxruntime", "openvino", "torch"])
    assert run(["plan", "--model", str(tiny_model), "--compare", *LENGTHS, "--json"]) == 0
    (row,) = [one for one in json.loads(capsys.readouterr().out)["policies"] if one["policy"] == NAME]
    assert 0 < row["read_share"] < row["stored_share"] < 1
    assert run(["plan", "--model", str(tiny_model), "--policy", NAME, *LENGTHS]) == 0


@pytest.mark.slow
def test_an_engine_is_built_verified_profiled_and_refused_where_kernels_are_missing(
    dropped_in, tiny_model, tmp_path, capfd
):
    engine = tmp_path / "engine"
    build = ["build", "--model", str(tiny_model), "--random-weights", "0", "--policy", NAME, *LENGTHS]
    assert run([*build, "--no-verify", "-o", str(engine)]) == 0
    capfd.readouterr()
    assert run(["verify", str(engine), "--level", "full", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    checks = [check["name"] for rung in report["rungs"] for check in rung["checks"]]
    for operator in ("KvcCompactLongKeys", "KvcNewestAttention"):
        assert f"{operator} indices" in checks
        assert f"{operator} caches" in checks
    assert run(["profile", str(engine), "--contexts", "64", "--batch", "1"]) == 0
    assert run(["inspect", str(engine)]) == 0
    assert "the newest" in capfd.readouterr().out
    assert run(["plan", "--model", str(tiny_model), "--policy", NAME, *LENGTHS, "--backend", "tensorrt"]) == 2
    assert "backend tensorrt has no kernel for prompt eviction long-keys" in capfd.readouterr().err
    assert run(["verify", str(engine), "--backend", "torch"]) == 0
    assert "prompt eviction, selection and attention run as PyTorch operations" in capfd.readouterr().out


@pytest.fixture
def built(dropped_in, tiny_model, tmp_path, capfd) -> EngineDirectory:
    path = tmp_path / "engine"
    build = ["build", "--model", str(tiny_model), "--random-weights", "0", "--policy", NAME, *LENGTHS]
    assert run([*build, "--no-verify", "-o", str(path)]) == 0
    capfd.readouterr()
    return open_engine(path)


def test_its_own_ranking_proves_a_near_tie(built):
    """No file of the program knows this kind, and verification tells rounding from errors in what it keeps.

    In the first layer, all copies of the token with the longer keys stay, and as many of the other one as fit.
    """
    batch = batch_of([PROMPT])
    given = KnownRun(built.model, built.weights(), built.parameters, batch, np.zeros((0, 1), np.int64))
    own = reference_run(given).choices
    taken = own[0][0][0, 0]
    left = np.setdiff1d(np.arange(len(PROMPT)), taken)
    (shorter,) = set(PROMPT[left])
    (longer,) = set(PROMPT[taken]) - {shorter}
    assert can_judge([built.parameters])

    def judged(kept: Mapping[int, np.ndarray]) -> IndexComparison:
        """Return the verdict on what an executor says that it kept."""
        chosen = {cache: [lists] for cache, lists in kept.items()}
        found = replay(given, chosen, Judging(thresholds_for("fp32").choice_slack)).explained
        assert found is not None
        return found

    def exchanged(token: int) -> IndexComparison:
        """Return the verdict where a copy of `token` has left its place to a copy of the shorter one."""
        lists = own[0][0].copy()
        out = taken[PROMPT[taken] == token][0]
        lists[0, 0] = np.sort([*taken[taken != out], left[-1]])
        return judged({0: lists, 1: own[1][0]})

    assert judged(observe(built, harness_for(built, RunOptions("onnxruntime", 1)), batch, 0).kept).wrong == ()
    near = exchanged(shorter)
    assert (near.compared, near.near_ties, near.swapped_tokens, near.wrong) == (4, 1, 1, ())
    real = exchanged(longer)
    assert (real.near_ties, len(real.wrong)) == (0, 1)
    assert real.wrong[0].startswith("cache 0, step 0: row 0, KV head 0: kept [")
    assert "float64 scores differ by" in real.wrong[0]


def test_the_tasks_ask_it(dropped_in, tmp_path, capsys):
    command = ["verify", "--level", "tasks", "--model", "retrieval-text", "--tasks", "lines", "--lengths", "384"]
    command += ["--samples", "2", "--modes", "query-aware", "--policies", NAME, "--budgets", "32"]
    assert run([*command, "--output-dir", str(tmp_path / "out"), "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["policy"] for cell in cells if cell["scores"]} == {"full", NAME}
