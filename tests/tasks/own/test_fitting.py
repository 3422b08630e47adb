"""Prompts that are too long: refused with their line, or cut in the middle as LongBench cuts them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from kvc_trt.errors import InputError
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.tasks.framing import Framing, chat, plain
from kvc_trt.tasks.own.fitting import SEAM, fitted, sample_of, tokens_of
from kvc_trt.tasks.own.reader import Record


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for every byte: a character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return Tokenizer(library.to_str().encode(), "tokenizer.json")


class Marks:
    """A template of two marks."""

    def render(self, messages, *, add_generation_prompt=True, now=None):
        return "".join(f"<{one['role'][0]}>{one['content']}</>" for one in messages) + "<a>"


def sample(context="0123456789" * 10, question=" Q?", **fields):
    return sample_of(Record(7, "x", "own", context, question, **fields), 0, "own")


def test_half_of_the_room_stays_at_each_end(tokenizer):
    framing = plain(tokenizer)
    cut = fitted(sample(), framing, 40 + SEAM, "own.jsonl", "middle")
    prompt = sample().prompt
    assert cut.prompt == prompt[:20] + prompt[-20:]
    assert (cut.question, cut.meta["truncated"]) == (" Q?", True)
    assert tokens_of(cut, framing) == 40 + SEAM
    whole = fitted(sample(), framing, 103 + SEAM, "own.jsonl", "middle")
    assert whole == sample()


def test_the_templates_words_are_counted(tokenizer):
    framing = chat(tokenizer, Marks())
    cut = fitted(sample(), framing, 50, "own.jsonl", "middle")
    ids = framing.ids(cut, query_aware=True).context
    text = tokenizer.decode(ids)
    assert text.startswith("<u>0123")
    assert text.endswith("9 Q?</><a>")  # nothing of the question is taken for the answer's beginning
    assert 48 - SEAM <= len(ids) <= 50 - SEAM


def test_a_character_is_never_cut(tokenizer):
    cut = fitted(sample("é" * 60), plain(tokenizer), 31 + SEAM, "own.jsonl", "middle")
    assert set(cut.context) == {"é"}
    assert tokens_of(cut, plain(tokenizer)) <= 31 + SEAM


def test_a_prompt_that_is_too_long_is_refused_with_its_line(tokenizer):
    framing = plain(tokenizer)
    with pytest.raises(InputError, match=r"own\.jsonl line 7: the prompt has 107 tokens, expected at most 40") as error:
        fitted(sample(), framing, 40, "own.jsonl", None)
    assert "--truncate middle" in (error.value.hint or "")
    with pytest.raises(InputError, match="line 7: the question is longer than half"):
        fitted(sample(question="?" * 30), framing, 40, "own.jsonl", "middle")
    with pytest.raises(InputError, match="line 7: the question is longer than half"):
        fitted(sample(), framing, SEAM, "own.jsonl", "middle")


def test_a_conversation_ends_with_its_question(tokenizer):
    told = tuple({"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "Yes"), ("user", "Who?")))
    one = sample("", "", messages=told)
    framing = chat(tokenizer, Marks())
    assert framing.texts(one) == ("<u>Hi</><a>Yes</><u>", "Who?</><a>")
    with pytest.raises(InputError, match="line 7: a conversation of 34 tokens cannot be cut"):
        fitted(one, framing, 20, "own.jsonl", "middle")
    with pytest.raises(InputError, match="takes a chat template"):
        plain(tokenizer).texts(one)
    with pytest.raises(InputError, match="changes the last message"):
        Framing(tokenizer, ("", ""), "", Loud()).texts(one)


def test_a_question_of_words_that_the_template_has_too_begins_where_it_stands(tokenizer):
    def parts(template, asked):
        told = (
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": asked},
        )
        return chat(tokenizer, template).texts(sample("", "", messages=told))

    assert parts(Marks(), "a") == ("<u>a</><a>b</><u>", "a</><a>")
    assert parts(Marks(), " a\n") == ("<u>a</><a>b</><u>", " a\n</><a>")
    assert parts(Trims(), " a\n") == ("<u>a</><a>b</><u>", "a</><a>")


class Trims(Marks):
    def render(self, messages, *, add_generation_prompt=True, now=None):
        return super().render([{**one, "content": one["content"].strip()} for one in messages])


class Loud(Marks):
    def render(self, messages, *, add_generation_prompt=True, now=None):
        return super().render(messages).upper()
