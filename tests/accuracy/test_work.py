"""The expected work of answers: the time left that follows from it, and a sum that is the total."""

from __future__ import annotations

import contextlib

import pytest

from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.questions import ModelVocabulary, draw
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.work import GroupWork
from tests.accuracy.cells import SETTINGS
from tests.accuracy.test_measure import DRAW, MODEL, VARIANTS, Fake

POLICIES, SAMPLES, ROOM = 12, 8, 32


@pytest.mark.parametrize("length", [512, 4096, 32768])
@pytest.mark.parametrize("step", [4, 15])
@pytest.mark.parametrize("said", [8, ROOM])
def test_the_first_time_left_is_not_far_off(length, step, said):
    """By a count of answers it was up to POLICIES times too long: the full cache is asked first, and reads prompts."""
    work = GroupWork(QuestionGroup("lines", "query-aware", length), ROOM, SAMPLES, [SAMPLES] * POLICIES, read_once=True)
    prompt, answer = length - ROOM, step * said
    true_left = (SAMPLES - 1) * (prompt + answer) + SAMPLES * (POLICIES - 1) * answer
    done = work.done(1, 1)
    assert 0.45 < (prompt + answer) * (work.total - done) / done / true_left < 2.2


def test_the_work_of_engines_that_each_read_the_prompt_is_alike():
    group = QuestionGroup("lines", "query-aware", 1024)
    work = GroupWork(group, ROOM, SAMPLES, [SAMPLES, SAMPLES], read_once=False)
    done = [work.done(1, sample) for _ in range(2) for sample in range(1, SAMPLES + 1)]
    assert len(set(done)) == 1
    assert sum(done) == work.total


class Counted:
    """Progress that keeps the total and the sum."""

    total, sum = 0, 0

    @contextlib.contextmanager
    def task(self, description, total):
        self.total = total
        yield self._advance

    def _advance(self, amount):
        assert amount >= 0
        self.sum += amount

    def note(self, message):
        pass


@pytest.mark.parametrize("read_once", [False, True])
def test_the_work_reported_is_the_total_also_of_a_run_that_goes_on(read_once, key_value, tmp_path, monkeypatch):
    vocabulary = ModelVocabulary(Fake.tokenizer, MODEL.vocab_size)
    drawn = draw(key_value, 128, vocabulary, samples=4, seed=0, max_new_tokens=None)
    monkeypatch.setattr(Fake, "reads_once", read_once)
    groups = [QuestionGroup(key_value, mode, 128) for mode in ("query-aware", "query-agnostic")]
    for variants in (VARIANTS[:2], [*VARIANTS[:2], Variant("tova", 64)]):
        counted = Counted()
        with Results(tmp_path / "results.jsonl", SETTINGS) as results:
            measure(Fake(drawn), variants, groups, DRAW, results, counted)
        assert counted.sum == counted.total > 0
