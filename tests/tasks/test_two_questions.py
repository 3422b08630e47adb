"""Two questions about one context: other entries, and either can be asked first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models.presets import load_preset
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.tasks.framing import chat, plain
from kvc_trt.tasks.kinds.key_value import WORDS
from kvc_trt.tasks.registry import all_tasks, task
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from tests.runtime.chat_templates import CHATML, MISTRAL, QWEN3
from tests.tasks.readers import by_word

BOTH = pytest.mark.parametrize("name", ["two-needles", "two-records"])


def sample_of(name, index=0, seed=0, target_tokens=600):
    return task(name).sample(seed=seed, index=index, target_tokens=target_tokens, encode=by_word)


def test_tasks_with_two_questions_are_listed():
    assert [one.name for one in all_tasks().values() if one.asks_twice] == ["two-needles", "two-records"]


@BOTH
@settings(max_examples=20)
@given(seed=st.integers(0, 2**40), index=st.integers(0, 10**6), target_tokens=st.integers(350, 1200))
def test_the_questions_ask_for_different_entries_of_one_context(name, seed, index, target_tokens):
    sample = sample_of(name, index, seed, target_tokens)
    first = sample.first
    assert first.context == sample.context
    assert first.question != sample.question
    assert set(first.answers).isdisjoint(sample.answers)
    for one in (sample, first):
        assert len(by_word(one.prompt)) + task(name).max_new_tokens <= target_tokens
        assert task(name).score(one.answers[0], one.answers) == 1
        assert one.answers[0] in one.context


@BOTH
def test_the_depth_is_that_of_the_entry_asked_for(name):
    samples = sorted((sample_of(name, index) for index in range(20)), key=lambda sample: sample.meta["depth"])
    places = [sample.context.index(sample.answers[0]) / len(sample.context) for sample in samples]
    assert max(abs(place - sample.meta["depth"]) for place, sample in zip(places, samples, strict=True)) < 0.3


def test_records_are_words_of_the_shipped_model():
    sample = sample_of("two-records")
    tokenizer = load_task_tokenizer("retrieval-tiny")
    assert load_preset("retrieval-tiny").config.vocab_size == len(WORDS)
    tokenizer.check_spelling(sample)
    assert sample.context.count("<record>") == 16
    assert plain(tokenizer.tokenizer).turn(sample) == tuple(tokenizer.encode(sample.question)[1:])


class Bytes:
    """Every byte is a token."""

    def encode(self, text, add_special_tokens=True):
        return SimpleNamespace(ids=list(text.encode()))


class TestThroughATemplate:
    @pytest.fixture
    def tokenizer(self):
        return Bytes()

    def test_the_turn_closes_the_answer_and_opens_the_next(self, tokenizer):
        sample = sample_of("two-needles")
        framing = chat(tokenizer, ChatTemplate(CHATML))
        said = bytes(framing.turn(sample)).decode()
        assert said.startswith("<|im_end|>\n<|im_start|>user\n\nQuestion: what does entry")
        assert said.endswith(f"<|im_end|>\n<|im_start|>assistant\n{sample.answer_prefix.lstrip()}")

    def test_prompt_answer_and_turn_are_what_the_template_writes(self, tokenizer):
        sample, template = sample_of("two-needles"), ChatTemplate(CHATML)
        framing = chat(tokenizer, template)
        first = bytes(framing.ids(sample.first, query_aware=True).context).decode()
        said = [
            ("user", sample.context + sample.first.question.removesuffix(sample.first.answer_prefix)),
            ("assistant", sample.first.answer_prefix.lstrip() + " 12345."),
            ("user", sample.question.removesuffix(sample.answer_prefix)),
        ]
        whole = template.render([{"role": role, "content": content} for role, content in said])
        assert first + " 12345." + bytes(framing.turn(sample)).decode() == whole + sample.answer_prefix.lstrip()

    def test_a_template_that_rewrites_an_answer_is_refused(self, tokenizer):
        framing = chat(tokenizer, ChatTemplate(MISTRAL, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}))
        # It writes a space before an answer, which is not what the model has seen.
        with pytest.raises(InputError, match="rewrites earlier messages before a second question"):
            framing.turn(sample_of("two-needles"))

    def test_a_thinking_template_without_thoughts_is_accepted(self, tokenizer):
        framing = chat(tokenizer, ChatTemplate(QWEN3))
        assert bytes(framing.turn(sample_of("two-needles"))).decode().startswith("<|im_end|>\n<|im_start|>user\n")
