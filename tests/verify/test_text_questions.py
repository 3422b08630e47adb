"""Needles as text: the shipped text model through both engines, plain and through a template."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.program import read_graph
from kvc_trt.files.held import HeldFile
from kvc_trt.verify.ladder import verify
from kvc_trt.verify.questions.question import Wording
from kvc_trt.verify.questions.wordings import wording_for
from tests.verify.underflowing import flush


class Template:
    """Asks in the words of the shipped model's vocabulary."""

    def render(self, messages, *, add_generation_prompt=True, now=None):
        return "Remember. " + messages[0]["content"] + "\n" * add_generation_prompt


def build(tmp_path_factory: pytest.TempPathFactory, *settings: str) -> EngineDirectory:
    path = tmp_path_factory.mktemp("engines") / "text"
    lengths = ["--token-budget", "64", "--max-input-len", "320"]
    assert run(["build", "--model", "retrieval-text", *lengths, *settings, "--no-verify", "-o", str(path)]) == 0
    return open_engine(path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    return build(tmp_path_factory, "--max-output-len", "48")


def wording_of(engine: EngineDirectory) -> Wording:
    wording = wording_for(engine)
    assert not isinstance(wording, str)
    return wording


def test_prompt_and_turn_questions_are_sentences(engine: EngineDirectory):
    report = verify(engine, level="retrieval", samples=4)
    assert report.passed, report.failures
    checks = report.rungs[0].checks
    assert [check.name for check in checks] == [
        "full | compressed, query in the prompt, 320 tokens", "answers as the reference's",
        "full | compressed, query after compaction, 320 tokens", "answers as the reference's",
    ]  # fmt: skip
    assert [check.sample for check in checks] == ["4 questions", "2 questions"] * 2
    assert str(checks[0].measured).startswith("100.0% ± 0.0% | ")
    assert checks[0].detail == "niah-single-1, plain prompts, budget 64"
    assert "of 4 questions the full cache answers 4, rocketkv at budget 64 " in report.as_text()


def test_a_model_with_a_template_is_asked_through_it(engine: EngineDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(vars(engine), "chat_template", Template())
    report = verify(engine, level="retrieval", samples=2)
    assert report.rungs[0].checks[0].detail == "niah-single-1, through the chat template, budget 64"
    assert all(check.passed is not False for check in report.rungs[0].checks)
    wording = wording_of(engine)
    late = wording.ask(context=320, placement="after_compaction", samples=1, seed=0).questions[0]
    whole = wording.ask(context=320, placement="in_prompt", samples=1, seed=0).questions[0]
    assert whole.prompt_ids == late.prompt_ids + late.query_ids
    assert len(whole.prompt_ids) <= 320


def test_logits_are_compared_on_text(engine: EngineDirectory):
    report = verify(engine, level="logits", steps=4)
    assert report.passed, report.failures
    assert report.halves.notes["compression"].endswith("on text (niah-single-1)")


@pytest.mark.slow
def test_an_executor_without_subnormal_numbers_is_right_on_text(tmp_path_factory: pytest.TempPathFactory):
    """The executor ranks tokens of no weight otherwise than the reference, in steps and in turns."""
    engine = build(tmp_path_factory, "--max-output-len", "48")
    for file in (engine.prefill_graph, engine.decode_graph, engine.extend_graph):
        assert file is not None
        graph = read_graph(file)
        flush(file.path.stem, graph)
        onnx.save(graph, str(file.path))
    changed = replace(engine, held={name: HeldFile(file.path) for name, file in engine.held.items()})
    report = verify(changed, level="logits", steps=4)
    assert report.passed, report.failures
    details = {check.name: check.detail for check in report.rungs[0].checks}
    assert "near-ties" in details["choices unlike the reference's own run"]
    assert "near-ties" in details["turns: tokens kept"]


@pytest.mark.parametrize("length", [1, 16, 400, 3000])
def test_a_prompt_has_the_length_that_is_asked_for(engine: EngineDirectory, length: int):
    first, second = wording_of(engine).prompts([length, length], 0)
    assert len(first) == len(second) == length
    assert first == wording_of(engine).prompts([length], 0)[0]


def test_a_late_query_that_has_no_room_is_not_asked(tmp_path_factory: pytest.TempPathFactory):
    report = verify(build(tmp_path_factory, "--max-output-len", "16"), level="retrieval", samples=1)
    checks = report.rungs[0].checks
    assert report.passed
    assert [check.measured for check in checks if "after compaction" in check.name] == ["not asked"]
    assert "the engine has room for 16" in checks[-1].detail


def test_a_prompt_too_short_for_a_needle_is_reported(tmp_path_factory: pytest.TempPathFactory):
    engine = build(tmp_path_factory, "--max-output-len", "48", "--max-input-len", "20")
    report = verify(engine, level="retrieval", samples=1)
    assert "the shortest prompt has" in report.rungs[0].reason
