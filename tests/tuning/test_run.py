"""`tune` from a file to a choice: what it asks, what it writes, and that built engines answer what it measured."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import kvc_trt
from kvc_trt.accuracy.draw import FileDraw
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.under_test.answerer import SessionAnswerer
from kvc_trt.accuracy.under_test.policy_engines import choose
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.building import build_configured
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.progress import NullProgress
from kvc_trt.tasks.own.reader import read_data_file
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from kvc_trt.tuning.prompts import OrderedPrompts
from kvc_trt.tuning.request import TuneRequest
from kvc_trt.tuning.rounds import WHOLE, groups_of
from kvc_trt.tuning.run import tune_model
from tests.accuracy.key_value import generate_key_value

MODEL = "retrieval-tiny"
PROMPTS = 14
POLICIES = ["full", "rocketkv", "snapkv-gqa", "tova", "h2o", "hybrid"]


def lines(count: int, *, answers: bool) -> list[dict[str, object]]:
    encode = load_task_tokenizer(MODEL).encode
    found = []
    for index in range(count):
        one = generate_key_value(seed=0, index=index, target_tokens=150 + 4 * (index % 8), encode=encode)
        line = {"id": index, "context": one.context, "question": one.question, "max_new_tokens": 5}
        found.append({**line, "answers": list(one.answers), "score": "exact"} if answers else line)
    return found


def written(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["answers", "faithfulness"])
def tuned(request, tmp_path_factory: pytest.TempPathFactory):
    """A run over a few policies in two formats, and its request."""
    folder = tmp_path_factory.mktemp("tuned")
    data = written(folder / "own.jsonl", lines(PROMPTS, answers=request.param))
    asked = TuneRequest(
        data=data, memory=8 * (150 << 10), rows=8, policies=POLICIES, formats=["auto", "int8"], gpu="h100",
        directory=folder / "out", maximum_divergence=5.0,
    )  # fmt: skip
    return tune_model(MODEL, asked, progress=NullProgress()), asked


class Engines:
    """Every candidate as an engine directory of its own, built and run as any other."""

    workers = 1
    reads_once = True

    def __init__(self, tuned, folder: Path) -> None:
        self._chosen, self._folder, self.row_bytes = tuned.chosen_model, folder, {}
        self.config, self.tokenizer, self.template = (
            self._chosen.config, self._chosen.tokenizer, self._chosen.template,
        )  # fmt: skip

    def describe(self):
        return {}

    def announce(self, variants, room):
        pass

    def open(self, variant, room):
        config = self._chosen.build(variant, room).model_copy(update={"weights": "fp32", "backend": "onnxruntime"})
        path = self._folder / re.sub(r"[^a-z0-9]", "-", str(variant))
        engine = build_configured(config, output=path, verify=False, progress=NullProgress()).result.engine
        executor = harness_for(engine, RunOptions("onnxruntime")).open()
        return SessionAnswerer(executor, engine.parameters, "onnxruntime", 2, self.config.eos_token_ids)


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_the_shared_prefill_gives_what_engines_that_were_built_answer(tuned, tmp_path):
    found, _ = tuned
    prompts, count = found.state.prompts, 4
    able = [one.variant for one in found.found.fitting if len(found.state.of(one)) >= count]
    some = {one.name: one for one in able} | {one.name: one for one in able[::2]}  # one of each, in both formats
    variants = list(dict.fromkeys([WHOLE, *some.values()]))
    assert {one.name for one in variants} == set(POLICIES)
    assert {one.settings.get("kv_cache", "auto") for one in variants} == {"auto", "int8"}
    with Results(tmp_path / "results.jsonl", {}) as results:
        cells = measure(Engines(found, tmp_path), variants, found.state.groups, prompts.first(count), results)
    for cell in cells:
        mine = found.state.cells[cell.key]
        if prompts.labelled:
            assert mine.scores[:count] == cell.scores, cell.key
        else:
            assert mine.scores[:count] == pytest.approx(cell.scores, abs=1e-6), cell.key
            assert mine.first_differences[:count] == cell.first_differences


@pytest.mark.slow
def test_bytes_are_those_of_the_engine_that_its_build_file_makes(tuned, tmp_path):
    found, asked = tuned
    assert found.finished
    assert found.good_enough
    best = found.recommendation.chosen
    stored = yaml.safe_load((Path(asked.directory) / "build.yaml").read_text())
    assert (stored["model"], stored["policy"], stored["max_batch_size"]) == (MODEL, best.variant.name, 8)
    with kvc_trt.build(config=Path(asked.directory) / "build.yaml", output=tmp_path / "engine", verify=False) as engine:
        session = engine.session(2)
        assert session.executor.state_bytes() == 2 * best.row_bytes
        assert engine.parameters == found.chosen_model.resolved(best.variant, found.room).parameters


def test_json_csv_and_page_have_the_same_candidates(tuned):
    found, asked = tuned
    folder = Path(asked.directory)
    document = json.loads((folder / "tune.json").read_text())
    rows = list(csv.DictReader((folder / "candidates.csv").open()))
    page = (folder / "tune.html").read_text()
    assert [one["candidate"] for one in rows] == [one["candidate"] for one in document["candidates"]]
    assert len(rows) == len(found.found.fitting)
    assert rows[0]["place"] == "chosen"
    assert rows[0]["candidate"] == document["recommendation"]["chosen"] == str(found.recommendation.chosen)
    for row in rows:
        assert f"{row['candidate']}</td>" in page
        assert int(row["row_bytes"]) <= asked.row_limit
        assert (row["quality"] != "") == (int(row["prompts"]) > 0)
    assert "MiB of cache per row" in page
    assert "ms for a step of 8 rows, floor of H100" in page
    assert document["findings"][0] in page.replace("&#39;", "'")
    assert "modelled, not measured" in document["step_times"]["how"]
    finalists = [row for row in rows if row["place"] in ("chosen", "alike", "behind")]
    assert {int(row["prompts"]) for row in finalists} == {PROMPTS}


def test_a_second_run_asks_nothing_and_finds_the_same(tuned):
    found, asked = tuned
    answers = (Path(asked.directory) / "results.jsonl").read_bytes()
    again = tune_model(MODEL, asked, progress=NullProgress())
    assert (Path(asked.directory) / "results.jsonl").read_bytes() == answers
    assert again.recommendation == found.recommendation
    assert [(line.candidate, line.place) for line in again.lines] == [(one.candidate, one.place) for one in found.lines]


def test_each_prompt_is_read_once(monkeypatch, tmp_path):
    from kvc_trt.backends.onnxruntime.prefill.shared_prefill import SharedPrefill

    stores = []
    before = SharedPrefill.__init__
    monkeypatch.setattr(SharedPrefill, "__init__", lambda self, *given: (stores.append(self), before(self, *given))[1])
    data = written(tmp_path / "own.jsonl", lines(PROMPTS, answers=True))
    asked = TuneRequest(
        data=data, memory=1 << 20, rows=8, policies=["tova", "snapkv-gqa"], formats=["auto"], gpu="h100",
        directory=tmp_path / "out",
    )  # fmt: skip
    tune_model(MODEL, asked, progress=NullProgress())
    assert [store.runs for store in stores] == [PROMPTS]


def test_steps_are_measured_here_and_slow_ones_left_out(tmp_path, capsys):
    data = written(tmp_path / "own.jsonl", lines(6, answers=True))
    given = ["--model", MODEL, "--data", str(data), "--memory", "1MiB", "--policies", "tova,full", "--formats", "auto"]
    assert run(["tune", *given, "--max-step-ms", "1e-6", "-o", str(tmp_path / "none")]) == 2
    assert "no step takes at most 1e-06 ms: the quickest" in capsys.readouterr().err
    assert run(["tune", *given, "--rows", "2", "--max-step-ms", "60000", "--json", "-o", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_times"]["rows"] == 2
    assert "measured on this machine" in found["step_times"]["how"]
    assert all(one["step_seconds"] > 0 for one in found["candidates"])
    before = (tmp_path / "out" / "steps.json").read_bytes()
    assert run(["tune", *given, "--rows", "2", "--max-step-ms", "60000", "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "steps.json").read_bytes() == before
    assert re.search(r" a row, \S+ KiB for 2 rows\.$", capsys.readouterr().out, re.MULTILINE)
    assert run(["tune", *given, "--rows", "1", "--max-step-ms", "60000", "--json", "-o", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_times"]["rows"] == 1
    assert found["findings"][0].endswith(" KiB a row."), "no sum over one row"


def test_no_good_enough_policy_exits_1_without_a_build_file(tmp_path, capsys):
    data = written(tmp_path / "own.jsonl", lines(PROMPTS, answers=True))
    arguments = ["tune", "--model", MODEL, "--data", str(data), "--memory", "60KiB", "--rows", "1", "--gpu", "h200"]
    arguments += ["--policies", "streaming-llm", "--formats", "auto", "-o", str(tmp_path / "out")]
    assert run(arguments) == 1
    streams = capsys.readouterr()
    assert "No candidate is good enough in 60.0 KiB a row" in streams.out
    assert "no candidate is good enough" in streams.err
    assert not (tmp_path / "out" / "build.yaml").exists()
    assert (tmp_path / "out" / "tune.html").exists()


@pytest.mark.slow
def test_a_run_that_is_ended_keeps_its_answers_and_goes_on(tmp_path):
    data = written(tmp_path / "own.jsonl", lines(24, answers=True))
    arguments = ["tune", "--model", MODEL, "--data", str(data), "--memory", "1MiB", "--gpu", "h100"]
    arguments += ["--policies", "snapkv-gqa,snapkv++,pyramidkv,keydiff", "-o", str(tmp_path / "out")]
    command = [sys.executable, "-m", "kvc_trt", *arguments]
    results = tmp_path / "out" / "results.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (results.exists() and results.read_bytes().count(b"\n") > 5) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "answers are kept; the same command goes on from there" in said
    page = (tmp_path / "out" / "tune.html").read_text()
    assert "run the same command to continue" in page
    kept = results.read_bytes()
    assert run(arguments) == 0
    assert results.read_bytes().startswith(kept)
    assert json.loads((tmp_path / "out" / "tune.json").read_text())["finished"]


def test_a_run_out_of_time_gives_no_recommendation(tmp_path):
    data = written(tmp_path / "own.jsonl", lines(PROMPTS, answers=True))
    asked = TuneRequest(
        data=data, memory=1 << 20, minutes=1e-6, policies=["tova"], gpu="h100", directory=tmp_path / "out"
    )
    found = tune_model(MODEL, asked, progress=NullProgress())
    assert (found.recommendation, found.finished, found.build) == (None, False, None)
    assert "run the same command to continue" in next(iter(found.findings()))
    asked = replace(asked, minutes=None, policies=["tova", "full"], formats=["auto"])
    assert tune_model(MODEL, asked, progress=NullProgress()).finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 8}, r"1 B for each, less than the .* of one token"),
        ({"memory": 32 << 10}, r"no candidate fits: 32.0 KiB for 8 rows are 4.0 KiB for each; .*hint"),
        ({"rows": 0}, "rows: expected at least 1, found 0"),
        ({"minutes": 0}, "minutes: expected more than 0, found 0"),
        ({"policies": ["tovaa"]}, "did you mean 'tova'"),
        ({"formats": ["int5"]}, "unknown cache format 'int5'"),
        ({"framing": "chat"}, "no chat template"),
        ({"framing": "talk"}, "unknown framing 'talk'"),
        ({"gpu": "h1000"}, "unknown GPU 'h1000'"),
        ({"sets": ["other"]}, "has no set 'other'"),
        ({"samples": 0}, "samples: expected at least 1"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_an_impossible_request_is_refused_in_one_line(change, message, tmp_path):
    data = written(tmp_path / "own.jsonl", lines(2, answers=True))
    asked = replace(TuneRequest(data=data, memory=1 << 20, rows=8, directory=tmp_path / "out"), **change)
    with pytest.raises(InputError) as caught:
        tune_model(MODEL, asked, progress=NullProgress())
    text = caught.value.message + (" hint " if caught.value.hint else "")
    assert re.search(message, text), text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"context": "a", "question": "b"}\n{"context": 3}\n', "line 2"),
        ("", "has no questions"),
        ('{"context": "a", "question": "b", "answers": [1]}\n', "line 1"),
        ('{"id": 1, "context": "a", "question": "b"}\n{"id": 1, "context": "a", "question": "b"}\n', "line 1 too"),
        ('{"context": "a", "question": "b", "answers": ["c"], "score": "f2"}\n', "unknown score"),
        (
            '{"context": "a", "question": "b"}\n{"context": "a", "question": "c", "answers": ["d"]}\n',
            "with answers and",
        ),
    ],
)
def test_an_invalid_data_file_is_refused_in_one_line(content, message, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text(content)
    arguments = ["tune", "--model", MODEL, "--data", str(tmp_path / "own.jsonl"), "--memory", "1MiB"]
    assert run([*arguments, "-o", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len([line for line in errors.splitlines() if line.startswith("error:")]) == 1
    assert not (tmp_path / "out").exists()


def test_a_prompt_longer_than_the_model_is_refused(tmp_path, capsys):
    records = lines(2, answers=True)
    records[1] = {**records[1], "context": " ".join(["the"] * 5000)}
    data = written(tmp_path / "own.jsonl", records)
    arguments = ["tune", "--model", MODEL, "--data", str(data), "--memory", "64MiB", "-o", str(tmp_path / "out")]
    assert run(arguments) == 2
    assert "line 2: prompt and answer take" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["", "much", "0", "-1GiB", "1 parsec"])
def test_an_invalid_memory_size_is_wrong_usage(size, capsys):
    assert run(["tune", "--model", MODEL, "--data", "x", "--memory", size, "-o", "y"]) == 2
    assert "is not a size such as 2GiB" in capsys.readouterr().err


def test_prompts_are_shuffled_alike_and_every_set_has_its_share(tmp_path):
    records = [{**one, "set": "ab"[index >= 10]} for index, one in enumerate(lines(20, answers=True))]
    draw = FileDraw(read_data_file(written(tmp_path / "own.jsonl", records)))
    prompts = OrderedPrompts.of(draw, None, 3)
    assert OrderedPrompts.of(draw, None, 3).names == prompts.names != OrderedPrompts.of(draw, None, 4).names
    assert sorted(prompts.names) == ["a"] * 10 + ["b"] * 10
    some = prompts.first(7)
    assert some.count_of("a") + some.count_of("b") == 7
    assert OrderedPrompts.of(draw, ["b"], 0).sets == ("b",)
    assert len(groups_of(prompts, 160, "plain")) == 2


def test_the_build_of_a_candidate_has_its_settings():
    chosen = choose(MODEL)
    from kvc_trt.accuracy.under_test.model_under_test import Room

    config = chosen.build(Variant("tova:window=4:kv_cache=int8", 64), Room(100, 8))
    assert (config.model, config.policy, config.kv_cache, config.window) == (MODEL, "tova", "int8", 4)
