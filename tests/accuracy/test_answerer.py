"""Engines in memory and the reference give the same answers, with the question in the prompt and after it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt import policies
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.questions import ModelVocabulary, ask, draw
from kvc_trt.accuracy.under_test import policy_engines
from kvc_trt.accuracy.under_test.answerer import (
    MOST_ROWS,
    QUESTIONS_BYTES,
    ROWS_BYTES,
    full_row_bytes,
    questions_for,
    rows_for,
)
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.reference import Prefills, ReferenceAnswerer
from kvc_trt.errors import InputError

LENGTH = 160


def questions(model, key_value, mode, samples=MOST_ROWS + 2):
    vocabulary = ModelVocabulary(model.tokenizer, model.config.vocab_size)
    drawn = draw(key_value, LENGTH, vocabulary, samples=samples, seed=0, max_new_tokens=None)
    return ask(QuestionGroup(key_value, mode, LENGTH), drawn, vocabulary)


@pytest.mark.parametrize("mode", ["query-aware", "query-agnostic"])
@pytest.mark.parametrize("policy", ["rocketkv", "hybrid"])
def test_the_reference_answers_as_the_engine(tiny, key_value, mode, policy):
    asked, room = questions(tiny, key_value, mode), Room(LENGTH - 5, 5 + 8)
    engine = tiny.open(Variant(policy, 32), room)
    from kvc_trt.graph.weights import EngineWeights

    weights = EngineWeights(tiny._file)
    ends = tiny.config.eos_token_ids
    reference = ReferenceAnswerer(tiny.config, weights, engine.parameters, MOST_ROWS, ends, Prefills())
    found = engine.answer(asked.flat, asked.max_new_tokens)
    assert reference.answer(asked.flat, asked.max_new_tokens) == found
    assert len(set(found)) > 1
    assert engine.row_bytes > reference.row_bytes > 0  # the engine's pages have bounds


def test_full_cache_answers_every_question(tiny, key_value):
    asked = questions(tiny, key_value, "query-agnostic")
    answerer = tiny.open(Variant("full", None), Room(LENGTH - 5, 13))
    assert asked.score(answerer.answer(asked.flat, asked.max_new_tokens)) == (1.0,) * (MOST_ROWS + 2)


def test_oracles_answer_in_the_reference_and_read_prompts_once(tiny, key_value, monkeypatch):
    asked, room = questions(tiny, key_value, "query-agnostic", samples=3), Room(LENGTH - 5, 13)
    tiny.announce([], room)
    small, large = (tiny.open(Variant("exact-topk", budget), room) for budget in (16, 64))
    assert small.executor == "reference"
    assert asked.score(large.answer(asked.flat, asked.max_new_tokens)) == (1.0,) * 3
    monkeypatch.setattr(type(small._decoder), "prefill", None)
    assert len(small.answer(asked.flat, asked.max_new_tokens)) == 3


def test_a_budget_below_the_methods_minimum_has_no_engine(tiny):
    with pytest.raises(InputError, match="observation window"):
        tiny.open(Variant("snapkv-gqa", 16), Room(LENGTH, 8))


def test_engines_are_opened_once_per_room(tiny):
    variant, room = Variant("full", None), Room(64, 8)
    tiny.announce([variant], room)
    first = tiny.open(variant, room)
    assert tiny.open(variant, room) is first
    tiny.announce([variant, Variant("hybrid", 32)], room)
    assert tiny.open(variant, room) is first
    tiny.announce([Variant("hybrid", 32)], room)
    assert (variant, room) not in tiny._open
    tiny.announce([variant], Room(72, 8))
    assert tiny.open(variant, room) is not first


def test_batch_size_is_bounded_by_the_bytes_of_full_caches():
    from kvc_trt.models.presets import load_preset

    large = load_preset("llama3.1-8b").config
    assert full_row_bytes(large, 1024) == 256 << 20  # 32 layers of 8 heads of 128 numbers, K and V, four bytes each
    assert questions_for(load_preset("retrieval-tiny").config, 2048) == MOST_ROWS
    assert questions_for(large, 1024) == QUESTIONS_BYTES // (256 << 20) == 6
    assert questions_for(large, 65536) == 1
    assert [rows_for(size) for size in (1, 256 << 20, ROWS_BYTES + 1)] == [MOST_ROWS, 3, 1]


def test_an_answer_cut_short_by_the_cache_is_an_error(tiny):
    from types import SimpleNamespace

    from kvc_trt.accuracy.under_test.answerer import _check_room

    parameters = tiny.open(Variant("full", None), Room(64, 8)).parameters
    whole, cut = SimpleNamespace(finish_reason="stop"), SimpleNamespace(finish_reason="capacity")
    _check_room(whole, parameters)
    with pytest.raises(InputError, match="an answer does not fit the engine's max_output_len of 8"):
        _check_room(cut, parameters)


@pytest.mark.parametrize("mode", ["query-aware", "query-agnostic"])
def test_the_likelihood_of_a_continuation_is_the_models_own(tiny, key_value, mode):
    """Token by token behind compacted rows of different lengths, against the reference that reads everything."""
    import torch

    from kvc_trt.accuracy.under_test.answerer import mean_negative_log_likelihood
    from kvc_trt.graph.weights import EngineWeights
    from kvc_trt.reference.model.decoder import ReferenceDecoder

    asked = questions(tiny, key_value, mode, samples=3)
    targets = [(150, 190), (151,), (160, 200, 210, 5)]
    given = [replace(one, target_ids=target) for one, target in zip(asked.flat, targets, strict=True)]
    answerer = tiny.open(Variant("full", None), Room(LENGTH - 5, 5 + 8))
    decoder = ReferenceDecoder(
        tiny.config,
        EngineWeights(tiny._file),
        method=policies.method(answerer.parameters),
        parameters=answerer.parameters,
    )
    for found, one in zip(answerer.surprise(given), given, strict=True):
        logits, cache = decoder.prefill(torch.tensor([one.prompt_ids]), torch.tensor([len(one.prompt_ids)]))
        said = [logits[0].numpy()]
        for token in (*one.continuation_ids, *one.target_ids[:-1]):
            said.append(decoder.decode(torch.tensor([token]), cache)[0].numpy())
        rows = np.stack(said[-len(one.target_ids) :])
        assert found == pytest.approx(mean_negative_log_likelihood(rows, one.target_ids), rel=1e-4)


def test_likelihoods_are_measured_on_engines(tiny):
    tiny.announce([], room := Room(LENGTH, 8))
    with pytest.raises(InputError, match="has no engine"):
        tiny.open(Variant("exact-topk", 64), room).surprise([])


def second_questions(model, samples=MOST_ROWS + 2, mode="second-question"):
    vocabulary = ModelVocabulary(model.tokenizer, model.config.vocab_size)
    drawn = draw("two-records", LENGTH, vocabulary, samples=samples, seed=0, max_new_tokens=None)
    return ask(QuestionGroup("two-records", mode, LENGTH), drawn, vocabulary)


class TestSecondQuestions:
    def room(self, asked):
        return Room(LENGTH - 5, asked.max_new_tokens, asked.turn_tokens)

    def test_full_cache_answers_every_second_question(self, tiny):
        asked = second_questions(tiny)
        assert asked.turn_tokens == 2 + 5
        answers = tiny.open(Variant("full", None), self.room(asked)).answer(asked.flat, asked.max_new_tokens)
        assert asked.score(answers) == (1.0,) * (MOST_ROWS + 2)

    def test_second_questions_are_turns_of_a_session(self, tiny):
        """Compares with the same turns by hand: the end of the first answer is fed, then the second question."""
        from kvc_trt.runtime import Request, Session

        asked = second_questions(tiny, samples=3)
        answerer = tiny.open(Variant("rocketkv", 64), self.room(asked))
        found = answerer.answer(asked.flat, asked.max_new_tokens)
        session = Session(answerer._executor, None, 1, end_token_ids=tiny.config.eos_token_ids)
        for question, answer in zip(asked.flat, found, strict=True):
            (row,) = session.add([Request(question.prompt_ids, asked.max_new_tokens, stay=True)])
            while session.rows:
                session.step()
            session.turn(row, question.turn_ids)
            said = []
            while session.rows:
                said += [event.token_id for event in session.step()]
            session.remove(row)
            assert tuple(said[: len(answer)]) == answer

    def test_an_end_token_that_the_template_writes_is_not_added_twice(self, tiny, monkeypatch):
        asked = second_questions(tiny, samples=2)
        answerer = tiny.open(Variant("full", None), self.room(asked))
        plain = answerer.answer(asked.flat, asked.max_new_tokens)
        (end,) = tiny.config.eos_token_ids
        closing = [replace(question, turn_ids=(end, *question.turn_ids)) for question in asked.flat]
        assert answerer.answer(closing, asked.max_new_tokens) == plain

    @pytest.mark.parametrize(
        ("policy", "message"),
        [("exact-topk", "has no engine, and second questions"), ("streaming-llm:positions=cache", "takes no turns")],
    )
    def test_policies_without_turns_refuse_second_questions(self, tiny, policy, message):
        asked = second_questions(tiny, samples=2)
        with pytest.raises(InputError, match=message):
            tiny.open(Variant(policy, 64), self.room(asked)).answer(asked.flat, asked.max_new_tokens)


class TestStoredContexts:
    def test_full_cache_answers_questions_about_a_stored_context(self, tiny):
        asked = second_questions(tiny, mode="stored-context")
        room = Room(LENGTH - 5, asked.max_new_tokens, asked.turn_tokens)
        answers = tiny.open(Variant("full", None), room).answer(asked.flat, asked.max_new_tokens)
        assert asked.score(answers) == (1.0,) * (MOST_ROWS + 2)

    def test_questions_on_one_context_start_from_it(self, tiny):
        """Compares with the same by hand: a stored context of the prompt, and a request that continues it."""
        from kvc_trt.contexts import RowPacking
        from kvc_trt.runtime import Request, Session
        from tests.contexts.conftest import FINGERPRINT

        asked = second_questions(tiny, samples=3, mode="stored-context")
        answerer = tiny.open(Variant("rocketkv", 64), Room(LENGTH - 5, asked.max_new_tokens, asked.turn_tokens))
        found = answerer.answer(asked.flat, asked.max_new_tokens)
        executor = answerer._executor
        packing = RowPacking(executor.program, FINGERPRINT)
        session = Session(executor, None, 1, end_token_ids=tiny.config.eos_token_ids, packing=packing)
        for question, answer in zip(asked.flat, found, strict=True):
            (row,) = session.add([Request(question.prompt_ids, keep_logits=True)])
            context = session.take(row)
            session.remove(row)
            (output,) = session.generate([Request(question.turn_ids, asked.max_new_tokens, context=context)])
            assert output.token_ids[: len(answer)] == answer

    def test_tasks_not_answered_in_words_have_no_stored_context_mode(self):
        from kvc_trt.accuracy.grid import question_groups
        from kvc_trt.tasks.registry import all_tasks

        others = [one.name for one in all_tasks().values() if one.score is None or one.reads == "ids"]
        assert others
        for name in others:
            with pytest.raises(InputError, match=f"task {name} is not answered in words"):
                question_groups([name], [512], ["stored-context"])


def test_a_task_that_asks_once_has_no_second_question():
    from kvc_trt.accuracy.grid import question_groups

    with pytest.raises(InputError, match="task lines asks one question") as caught:
        question_groups(["two-records", "lines"], [512], ["second-question"])
    assert caught.value.hint == "tasks: two-needles, two-records"


def test_few_engines_stay_loaded_and_answer_as_before(tiny, key_value, monkeypatch):
    asked, room = questions(tiny, key_value, "query-aware", samples=2), Room(LENGTH - 5, 5)
    variants = [Variant(policy, 32) for policy in ("tova", "hybrid", "rocketkv")]
    tiny.announce(variants, room)
    first = [tiny.open(one, room) for one in variants]
    expected = [one.answer(asked.flat, 5) for one in first]
    monkeypatch.setattr(policy_engines, "MOST_LOADED", 2)
    again = [tiny.open(one, room) for one in variants]
    assert [one is other for one, other in zip(first, again, strict=True)] == [True, True, False]
    assert [one.answer(asked.flat, 5) for one in again] == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_engines_of_few_threads_are_asked_side_by_side(threads, monkeypatch):
    monkeypatch.setattr(policy_engines, "usable_cores", lambda: 4)
    with policy_engines.open_model("retrieval-tiny", threads=threads) as model:
        assert model.workers == 4 // threads
