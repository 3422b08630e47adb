"""The loop over the grid, with an answerer that knows everything, something or nothing."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvc_trt import policies
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.questions import ModelVocabulary, ask, draw
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.work import STEP
from kvc_trt.errors import InputError
from kvc_trt.models.presets import load_preset
from kvc_trt.progress import NullProgress
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from tests.accuracy.cells import SETTINGS

MODEL = load_preset("retrieval-tiny").config
VARIANTS = [Variant("full", None), Variant("rocketkv", 64), Variant("snapkv-gqa", 16)]
DRAW = QuestionDraw(4, 0)


class Fake:
    """Answers right under full, wrong under everything else; has no snapkv-gqa."""

    config, workers, template, reads_once = MODEL, 1, None, True
    tokenizer = load_task_tokenizer("retrieval-tiny")

    def __init__(self, drawn, wrong=("rocketkv",)) -> None:
        self.asked: list[str] = []
        self.announced: list[int] = []
        self.rooms = set()
        self._answers, self._wrong = [sample.answers[0] for sample in drawn.samples], wrong

    def describe(self):
        return {}

    def announce(self, variants, room):
        self.announced.append(len(variants))
        self.rooms.add(room)

    def open(self, variant, room):
        if variant.name == "snapkv-gqa":
            raise InputError("too small")
        parameters = policies.resolve("full", model=MODEL, token_budget=None, max_input_len=9, max_output_len=9)

        def answer(questions, max_new_tokens):
            self.asked.append(str(variant))
            right = [next((ids for ids in map(self._ids, self._answers) if q.is_answered(ids)), ()) for q in questions]
            return [() if variant.name in self._wrong else ids for ids in right]

        return SimpleNamespace(answer=answer, parameters=parameters, row_bytes=7, executor="fake")

    def _ids(self, text):
        return tuple(self.tokenizer.tokenizer.encode(text).ids)


@pytest.fixture
def drawn(key_value):
    vocabulary = ModelVocabulary(Fake.tokenizer, MODEL.vocab_size)
    return draw(key_value, 128, vocabulary, samples=4, seed=0, max_new_tokens=None)


@pytest.fixture
def groups(key_value):
    return [QuestionGroup(key_value, mode, 128) for mode in ("query-aware", "query-agnostic")]


def run(model, groups, path, draw=DRAW, variants=VARIANTS):
    with Results(path, SETTINGS) as results:
        return measure(model, variants, groups, draw, results)


def test_cells_say_what_was_answered_and_what_does_not_apply(drawn, groups, tmp_path):
    model = Fake(drawn)
    full, wrong, absent, *rest = run(model, groups, tmp_path / "r")
    assert (full.scores, full.evidence, full.row_bytes, full.executor) == ((1.0,) * 4, True, 7, "fake")
    assert (wrong.scores, wrong.full_accuracy, wrong.evidence) == ((0.0,) * 4, 1.0, True)
    assert (absent.scores, absent.reason) == ((), "too small")
    assert {cell.dataset for cell in (full, *rest)} == {drawn.digest}
    assert [cell.query_aware for cell in (full, *rest)] == [True, False, False, False]


def test_the_room_holds_the_answer_and_a_late_question(drawn, groups, tmp_path):
    model = Fake(drawn)
    run(model, groups, tmp_path / "r")
    assert {(room.max_input_len, room.max_output_len) for room in model.rooms} == {(123, 5), (123, 13)}


def test_the_longest_answer_may_be_told_by_task(drawn, groups, tmp_path, key_value):
    draw = QuestionDraw(4, 0, {key_value: 8, "lines": 99})
    (cell,) = run(Fake(drawn), groups[:1], tmp_path / "r", draw, VARIANTS[:1])
    assert cell.max_new_tokens == 8
    assert (draw.room("passkey"), QuestionDraw(4, 0, 7).room("passkey"), DRAW.room("passkey")) == (None, 7, None)


def test_a_second_run_asks_only_what_is_missing(drawn, groups, tmp_path):
    path = tmp_path / "r"
    run(Fake(drawn), groups[:1], path, variants=VARIANTS[:2])
    again = Fake(drawn)
    cells = run(again, groups, path)
    assert again.asked == ["full", "rocketkv 64"]  # of the second mode
    assert sorted(again.announced) == [1, 3]
    assert len(cells) == 6
    nothing = Fake(drawn)
    assert run(nothing, groups, path) == cells
    assert not nothing.asked


def test_a_run_that_was_cut_short_goes_on_within_a_group(drawn, groups, tmp_path, monkeypatch):
    path = tmp_path / "r"
    monkeypatch.setattr("kvc_trt.accuracy.measure.questions_for", lambda model, sequence: 2)
    first = replace(DRAW, asked=2)
    full, wrong, absent = run(Fake(drawn), groups[:1], path, first)
    assert [full.samples, wrong.samples, absent.reason] == [2, 2, "too small"]
    again = Fake(drawn)
    full, wrong, _ = run(again, groups[:1], path)
    assert [full.samples, wrong.samples] == [4, 4]
    assert again.asked == ["full", "rocketkv 64"]  # the last two questions
    assert len({str(line) for line in path.read_text().splitlines()}) == 6  # a cell has a line per block


@pytest.fixture
def one_by_one(monkeypatch):
    """Questions so long that each answer is kept before the next one is asked."""
    monkeypatch.setattr("kvc_trt.accuracy.measure.TOKENS_AT_ONCE", 1)


def test_as_many_questions_are_asked_together_as_the_caller_says(drawn, groups, tmp_path):
    model = Fake(drawn)
    asked = ask(groups[0], drawn, ModelVocabulary(model.tokenizer, MODEL.vocab_size))
    longest = max(len(one.prompt_ids) for one in asked.flat)
    with Results(tmp_path / "r", SETTINGS) as results:
        measure(model, VARIANTS, groups[:1], DRAW, results, tokens_at_once=2 * longest)
    assert model.asked == ["full"] * 2 + ["rocketkv 64"] * 2


def test_every_answer_is_kept_and_progress_counts_them(drawn, groups, tmp_path, one_by_one):
    counted = []

    class Counting(NullProgress):
        @contextmanager
        def task(self, description, total):
            counted.append(total)
            yield counted.append

    model, path = Fake(drawn), tmp_path / "r"
    with Results(path, SETTINGS) as results:
        full, wrong, absent = measure(model, VARIANTS, groups[:1], DRAW, results, Counting())
    assert (full.scores, wrong.scores, absent.reason) == ((1.0,) * 4, (0.0,) * 4, "too small")
    assert model.asked == ["full"] * 4 + ["rocketkv 64"] * 4
    room = DRAW.answer_room(groups[0].task)
    answer, prompt = STEP * round(room / 2), 128 - room
    assert counted == [4 * prompt + 12 * answer, *[prompt + answer] * 4, *[answer] * 4, 4 * answer]
    assert len(path.read_text().splitlines()) == 4  # a cell has a line for its block
    assert not path.with_suffix(".partial.jsonl").exists()


def test_an_interrupted_run_keeps_every_answer_and_the_next_run_resumes(drawn, groups, tmp_path, one_by_one):
    path, notes = tmp_path / "r", []

    class Noting(NullProgress):
        def note(self, message):
            notes.append(message)

    class Ended(Fake):
        """Hears Ctrl-C while it answers the third question, and would take forever."""

        def open(self, variant, room):
            answerer = super().open(variant, room)
            answer, waited = answerer.answer, threading.Event()

            def slow(questions, max_new_tokens):
                if len(self.asked) == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                    waited.wait(1)
                return answer(questions, max_new_tokens)

            answerer.answer = slow
            return answerer

    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt), Results(path, SETTINGS) as results:
            measure(Ended(drawn), VARIANTS[:2], groups[:1], DRAW, results, Noting())
    finally:
        signal.signal(signal.SIGINT, heard)
    assert notes == [f"{path}: 2 answers are kept; the same command goes on from there"]
    again = Fake(drawn)
    full, wrong = run(again, groups[:1], path, variants=VARIANTS[:2])
    assert (full.scores, wrong.scores) == ((1.0,) * 4, (0.0,) * 4)
    assert again.asked == ["full"] * 2 + ["rocketkv 64"] * 4
    assert run(Fake(drawn), groups[:1], path, variants=VARIANTS[:2]) == [full, wrong]


def test_answers_of_other_settings_or_cut_short_are_not_taken(drawn, groups, tmp_path):
    path = tmp_path / "r"
    cell, *_ = run(Fake(drawn), groups[:1], tmp_path / "other", variants=VARIANTS[:1])
    with Results(path, SETTINGS) as results:
        results.keep(cell)
    partial = path.with_suffix(".partial.jsonl")
    whole = partial.read_bytes()
    with Results(path, SETTINGS) as results:
        assert list(results.cells.values()) == [cell]
    partial.write_bytes(whole[:-1])
    with Results(path, SETTINGS) as results:
        assert not results.cells
    partial.write_bytes(whole)
    path.unlink()
    with Results(path, {**SETTINGS, "seed": 1}) as results:
        assert not results.cells


def test_no_question_is_asked_after_the_time_limit(drawn, groups, tmp_path):
    model = Fake(drawn)
    with Results(tmp_path / "r", SETTINGS) as results:
        assert measure(model, VARIANTS, groups, DRAW, results, until=0.0) == []
    assert not model.asked


def test_cells_whose_full_cache_answers_little_do_not_count(drawn, groups, tmp_path):
    full, other, _ = run(Fake(drawn, wrong=("full",)), groups[:1], tmp_path / "r")
    assert (full.evidence, other.evidence, other.full_accuracy) == (False, False, 0.0)


def test_results_of_other_questions_are_refused(drawn, groups, tmp_path):
    path = tmp_path / "r"
    cell, *_ = run(Fake(drawn), groups[:1], path, variants=VARIANTS[:1])
    path.unlink()
    with Results(path, SETTINGS) as results:
        results.append(replace(cell, dataset="0" * 64))
    with pytest.raises(InputError, match="answers to other questions"):
        run(Fake(drawn), groups[:1], path)


def test_a_length_beyond_the_models_positions_is_refused_before_anything_is_asked(drawn, tmp_path, key_value):
    model = Fake(drawn)
    with pytest.raises(InputError, match="--lengths 9999: the model takes at most 4096"):
        run(model, [QuestionGroup(key_value, "query-aware", 9999)], tmp_path / "r")
    assert not model.asked


def test_questions_that_the_tokenizer_cannot_spell_are_left_out(drawn, tmp_path):
    with pytest.raises(InputError, match="cannot spell"):
        run(Fake(drawn), [QuestionGroup("niah-single-1", "query-aware", 1024)], tmp_path / "r")


def test_tasks_of_text_without_a_tokenizer_are_refused(key_value):
    with pytest.raises(InputError, match="the model has no tokenizer"):
        draw(key_value, 128, ModelVocabulary(None, 326), samples=1, seed=0, max_new_tokens=None)


def test_recall_is_one_question_per_key_and_scored_together():
    vocabulary = ModelVocabulary(None, 512)
    drawn = draw("associative-recall", 256, vocabulary, samples=2, seed=0, max_new_tokens=None)
    for mode, question_tokens in (("query-aware", 32), ("query-agnostic", 0)):
        asked = ask(QuestionGroup("associative-recall", mode, 256), drawn, vocabulary)
        assert [len(one) for one in asked.questions] == [8, 8]
        assert len(asked.flat[0].prompt_ids) - question_tokens == len(drawn.samples[0].context.split())
        assert asked.max_new_tokens == 1
        right = [[int(answer)] for sample in drawn.samples for answer in sample.answers]
        assert asked.score(right) == (1.0, 1.0)
        assert asked.score([[0], *right[1:]]) == (7 / 8, 1.0)


def test_an_answer_is_complete_when_it_says_all(drawn, groups):
    vocabulary = ModelVocabulary(Fake.tokenizer, MODEL.vocab_size)
    question = ask(groups[0], drawn, vocabulary).flat[0]
    ids = Fake.tokenizer.tokenizer.encode(drawn.samples[0].answers[0]).ids
    assert question.is_answered(ids)
    assert question.is_answered([*ids, *ids])
    assert not question.is_answered(ids[:-1])


def test_a_chat_needs_a_template_and_puts_it_around_the_question(drawn, key_value):
    template = SimpleNamespace(render=lambda messages, **_: f"a{messages[0]['content']}b")
    vocabulary = ModelVocabulary(Fake.tokenizer, MODEL.vocab_size)
    with pytest.raises(InputError, match="no chat template"):
        ask(QuestionGroup(key_value, "query-aware", 128, "chat"), drawn, vocabulary)
    with pytest.raises(InputError, match="no chat template takes"):
        draw("associative-recall", 256, vocabulary, samples=1, seed=0, max_new_tokens=None, framing="chat")
    (plain, *_), (framed, *_) = (
        ask(QuestionGroup(key_value, "query-aware", 128, framing), drawn, replace(vocabulary, template=template)).flat
        for framing in ("plain", "chat")
    )
    first, *_ = Fake.tokenizer.tokenizer.encode("a", add_special_tokens=False).ids
    assert (framed.prompt_ids[0], framed.prompt_ids[1:3]) == (first, plain.prompt_ids[2:4])
