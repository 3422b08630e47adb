"""The shipped model answers through both engines; for other engines a note says why the task does not apply."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvc_trt import build
from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.engine import EngineDirectory
from kvc_trt.progress import Advance, NullProgress
from kvc_trt.verify.ladder import verify
from kvc_trt.verify.questions.question import Accuracy


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    path = tmp_path_factory.mktemp("engines") / "tiny"
    settings = ["--model", "retrieval-tiny", "--token-budget", "64", "--max-input-len", "512", "--max-output-len", "16"]
    assert run(["build", *settings, "--no-verify", "-o", str(path)]) == 0
    return open_engine(path)


def test_full_and_compressed_accuracies_of_each_placement_are_reported(engine: EngineDirectory):
    report = verify(engine, level="retrieval", samples=6)
    assert report.passed, report.failures
    (retrieval,) = report.rungs
    names = [check.name for check in retrieval.checks]
    assert [name.split(",")[0] for name in names] == [
        "full | compressed", "answers as the reference's", "full | compressed", "answers as the reference's",
    ]  # fmt: skip
    assert ("in the prompt" in names[0], "after compaction" in names[2]) == (True, True)
    assert str(retrieval.checks[0].measured).startswith("100.0% ± 0.0% | ")
    assert retrieval.checks[1].passed


class Counted(NullProgress):
    """Notes each task's total and the amounts that it advanced by."""

    def __init__(self) -> None:
        self.tasks: dict[str, tuple[int | None, list[int]]] = {}

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[Advance]:
        self.tasks[description] = total, []
        yield self.tasks[description][1].append


def test_progress_counts_every_answer_so_that_it_can_say_the_time_left(engine: EngineDirectory):
    progress = Counted()
    report = verify(engine, level="retrieval", samples=6, progress=progress)
    total, steps = progress.tasks["retrieval"]
    assert report.passed
    assert total == sum(steps) == 2 * 3 * 6, "two placements; the engine, its dense twin and the reference"
    assert len(steps) > 2 * 2 * 6, "each answer of the engines by itself"


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_answers_from_caches_in_a_format_are_the_references_along_the_same_codes(form: str, tmp_path: Path):
    sizes = {"token_budget": 64, "max_input_len": 512, "max_output_len": 16}
    built = build("retrieval-tiny", kv_cache=form, output=tmp_path / "engine", verify=False, **sizes)
    report = verify(open_engine(built.path), level="retrieval", samples=4)
    assert report.passed, report.failures
    judged = [check for check in report.rungs[0].checks if check.name == "answers as the reference's"]
    assert [check.measured for check in judged] == ["4", "4"]


def test_the_shipped_checkpoint_fills_the_third_column(engine: EngineDirectory):
    report = verify(engine, level="logits", steps=2)
    assert report.halves.quantisation is not None
    assert report.halves.quantisation.max_logit_error < 1e-6


def test_accuracy_has_a_binomial_error():
    assert str(Accuracy(75, 100)) == "75.0% ± 4.3%"


def test_words_that_the_tokenizer_lacks_are_not_applicable(engine: EngineDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvc_trt.verify.questions.wordings.WORDS", ("other", "words"))
    report = verify(engine, level="retrieval", samples=1)
    assert "niah-single-1: the tokenizer cannot spell this task: " in report.rungs[0].reason
    assert not report.passed


def test_a_missing_checkpoint_is_an_error_before_anything_is_compared(
    engine: EngineDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvc_trt.verify.ladder.harness_for", lambda *_: pytest.fail("the engine was opened"))
    assert run(["verify", str(engine.path), "--level", "logits", "--checkpoint", str(tmp_path / "none")]) == 2
