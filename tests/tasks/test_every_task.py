"""Properties that every task of the suite has."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.tasks import kinds
from kvc_trt.tasks.kinds.associative_recall import ids_of
from kvc_trt.tasks.registry import all_tasks, task
from kvc_trt.tasks.task import Task
from tests.tasks.readers import by_byte, by_word

EVERY_TASK = pytest.mark.parametrize("chosen", all_tasks().values(), ids=lambda chosen: chosen.name)
DIGESTS = {
    "passkey": "fc98e13bf848bd07",
    "niah-single-1": "f5335f0bc15de9a8",
    "niah-single-2-prose": "e4bc3e4050096d1b",
    "niah-single-3-prose": "c720fd1c505c46f1",
    "niah-multikey-1-prose": "9a4c754c3699ef94",
    "niah-multikey-2": "e88a47e74bd1b417",
    "niah-multikey-3": "ccb818df02240ce4",
    "niah-multivalue": "5283a83e6dcca28a",
    "niah-multivalue-prose": "a278521f93504a40",
    "niah-multiquery": "cd08756294457d10",
    "niah-multiquery-prose": "b802165b14b5e8a8",
    "variable-tracking": "12d6fc34cc9f0cc4",
    "common-words": "4bdbb87f1b858bc6",
    "frequent-words": "dabba25802b0f16a",
    "lines": "0c09161d53ba813c",
    "log-summary": "9233467bcd015183",
    "associative-recall": "36993a487052dacc",
    "multi-instruction": "ff1b094e04cdf880",
    "tool-calls": "2d024f9c63188d05",
    "two-needles": "cedbdb8448dfaf88",
    "two-records": "465b11814d007e80",
}
"""Digests of samples 0 to 3 at 2,048 tokens. If one changes, raise the version in dataset.py and say why."""


def encode_of(chosen: Task, reader=by_word):
    return ids_of if chosen.reads == "ids" else reader


def draw(chosen: Task, *, seed=0, index=0, target_tokens=2048, reader=by_word, max_new_tokens=None, **options):
    return chosen.sample(
        seed=seed,
        index=index,
        target_tokens=target_tokens,
        encode=encode_of(chosen, reader),
        max_new_tokens=max_new_tokens,
        **options,
    )


@EVERY_TASK
@settings(max_examples=6)
@given(seed=st.integers(0, 2**63), index=st.integers(0, 10**6), target_tokens=st.integers(1200, 4500))
def test_a_sample_fits_its_target_and_holds_its_answers(chosen, seed, index, target_tokens):
    sample = draw(chosen, seed=seed, index=index, target_tokens=target_tokens)
    assert (sample.task, sample.seed, sample.index) == (chosen.name, seed, index)
    assert len(encode_of(chosen)(sample.prompt)) + chosen.max_new_tokens <= target_tokens
    assert sample.answers
    assert len(set(sample.answers)) == len(sample.answers)
    if chosen.scored_by == "answer" and chosen.name != "tool-calls":  # whose answer is made of two places
        assert all(answer in sample.context for answer in sample.answers)
    assert not any(answer in sample.question for answer in sample.answers)
    assert sample == draw(chosen, seed=seed, index=index, target_tokens=target_tokens)
    assert json.loads(json.dumps(sample.meta)) == sample.meta


@EVERY_TASK
@pytest.mark.parametrize(("target_tokens", "max_new_tokens"), [(1100, 20), (4500, None)])
def test_a_sample_fills_its_target(chosen, target_tokens, max_new_tokens):
    sample = draw(chosen, target_tokens=target_tokens, max_new_tokens=max_new_tokens)
    room = target_tokens - (chosen.max_new_tokens if max_new_tokens is None else max_new_tokens)
    assert room - 64 <= len(encode_of(chosen)(sample.prompt)) <= room


@EVERY_TASK
def test_a_byte_tokenizer_keeps_to_the_target(chosen):
    sample = draw(chosen, target_tokens=8000, reader=by_byte)
    assert len(encode_of(chosen, by_byte)(sample.prompt)) + chosen.max_new_tokens <= 8000


@EVERY_TASK
def test_samples_differ_and_do_not_depend_on_one_another(chosen):
    forwards = [draw(chosen, index=index) for index in range(4)]
    backwards = [draw(chosen, index=index) for index in reversed(range(4))]
    assert forwards == backwards[::-1]
    assert len({sample.answers for sample in forwards}) == 4
    assert draw(chosen, seed=1).answers != forwards[0].answers


@EVERY_TASK
def test_the_samples_are_the_recorded_ones(chosen):
    text = json.dumps([asdict(draw(chosen, index=index)) for index in range(4)], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[chosen.name]


@EVERY_TASK
def test_the_answers_score_one_and_other_words_nothing(chosen):
    sample = draw(chosen)
    if chosen.scored_by == "likelihood":
        assert chosen.score is None
        assert len(sample.answers) == 1  # the continuation
        return
    separator = " " if chosen.reads == "ids" else ", "
    assert chosen.score(separator.join(sample.answers), sample.answers) == 1
    assert chosen.score("", sample.answers) == 0
    assert chosen.score("nothing of the kind", sample.answers) == 0


@EVERY_TASK
@pytest.mark.parametrize("target_tokens", [1, 50])
def test_a_target_that_is_too_short_is_refused(chosen, target_tokens):
    with pytest.raises(InputError, match=chosen.name) as caught:
        draw(chosen, target_tokens=target_tokens)
    least = int(caught.value.hint.split()[-2])
    uneven = 20 if "uuids" in repr(chosen.generate) else 0  # UUIDs of other targets are other UUIDs
    assert draw(chosen, target_tokens=least + uneven).answers
    with pytest.raises(InputError):
        draw(chosen, target_tokens=least - uneven - 1)


@EVERY_TASK
def test_a_question_is_short_enough_for_the_window(chosen):
    """Query-aware results need the question inside the window of 32 tokens; UUIDs as keys are longer."""
    longest = max(len(encode_of(chosen)(draw(chosen, index=index).question)) for index in range(4))
    assert (longest <= 32 + 1) == (chosen.name != "niah-multikey-3")  # the start token is not part of it


@EVERY_TASK
def test_the_beginning_of_the_answer_is_the_end_of_the_question(chosen):
    for index in range(4):
        sample = draw(chosen, index=index)
        assert sample.question.endswith(sample.answer_prefix)
        asked = sample.question.removesuffix(sample.answer_prefix)
        if chosen.reads == "ids" or chosen.name == "two-records":  # which no sentence asks for
            assert sample.answer_prefix == ""
        else:
            assert asked[-1] in "?."
            assert sample.answer_prefix.split()[0] in ("Answer:", "The", "They", "Numbers:", "Summary:", "Call:")


@EVERY_TASK
def test_unknown_options_and_wrong_types_are_refused(chosen):
    with pytest.raises(InputError, match=f"task {chosen.name} has no option 'colour'"):
        draw(chosen, colour="red")
    for option, kind in chosen.options.items():
        with pytest.raises(InputError, match=f"{option} is True, expected a"):
            draw(chosen, **{option: True})
        with pytest.raises(InputError, match=option):
            draw(chosen, **{option: 3 if kind is str else "three"})


def test_the_nearest_option_is_named():
    with pytest.raises(InputError, match="no option 'dept'; did you mean 'depth'"):
        draw(task("passkey"), dept=0.5)


def test_the_nearest_task_is_named():
    with pytest.raises(InputError, match="unknown task 'Variable-Traking'; did you mean 'variable-tracking'") as caught:
        task("Variable-Traking")
    assert caught.value.hint == "kvc-trt tasks lists them"


def test_where_the_original_downloads_essays_the_name_says_prose():
    assert {name for name in all_tasks() if name.endswith("-prose")} == {
        "niah-single-2-prose",
        "niah-single-3-prose",
        "niah-multikey-1-prose",
        "niah-multivalue-prose",
        "niah-multiquery-prose",
    }


def test_a_file_is_a_task(tmp_path, monkeypatch):
    """A new file brings everything that it needs: no list elsewhere names it."""
    source = """
from kvc_trt.tasks.task import MATCH_ALL, Task, TaskSample, string_match_all

def generate(*, seed, index, target_tokens, encode, max_new_tokens=4):
    return TaskSample("echo", seed, index, "Say yes.", " Now:", ("yes",))

TASKS = (Task("echo", "needles", "one word", 4, generate, string_match_all, MATCH_ALL),)
"""
    (tmp_path / "echo.py").write_text(source)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path)])
    all_tasks.cache_clear()
    try:
        assert task("echo").sample(seed=0, index=0, target_tokens=8, encode=by_word).answers == ("yes",)
        assert len(all_tasks()) == len(DIGESTS) + 1
    finally:
        all_tasks.cache_clear()
        sys.modules.pop("kvc_trt.tasks.kinds.echo", None)
