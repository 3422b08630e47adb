from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.tasks import framing
from kvc_trt.tasks.dataset import draw_data_set, read_data_set
from kvc_trt.tasks.registry import all_tasks, task
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from tests.tasks.conftest import byte_tokenizer

TEXT_TASKS = [one for one in all_tasks().values() if one.reads == "text"]
BYTES = byte_tokenizer()


class Template:
    """A template with a system message and marks around each message."""

    def render(self, messages, *, add_generation_prompt=True, now=None):
        said = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return f"<system>Be brief.</>{said}" + "<assistant>" * add_generation_prompt


CHAT = framing.chat(BYTES, Template())
PLAIN = framing.plain(BYTES)


def text_of(ids):
    return BYTES.decode(list(ids), skip_special_tokens=False)


def sample_of(chosen, how, **arguments):
    return chosen.sample(**{"seed": 0, "index": 0, "target_tokens": 8000, "encode": how.encode} | arguments)


@pytest.mark.parametrize("chosen", TEXT_TASKS, ids=lambda chosen: chosen.name)
@pytest.mark.parametrize("how", [PLAIN, CHAT], ids=["plain", "chat"])
def test_query_aware_and_agnostic_modes_feed_the_same_text(chosen, how):
    sample = sample_of(chosen, how)
    aware, late = how.ids(sample, query_aware=True), how.ids(sample, query_aware=False)
    assert aware.question == ()
    assert text_of(aware.context) == text_of(late.context) + text_of(late.question)
    assert text_of(late.context).endswith(sample.context)
    assert len(aware.context) + chosen.max_new_tokens <= 8000
    assert text_of(how.continuation(sample)) == sample.answers[0]


def test_a_template_that_writes_the_date_makes_the_same_questions_every_day():
    template = ChatTemplate("<{{ strftime_now('%d %b %Y') }}>{{ messages[0].content }}<a>")
    assert framing.chat(BYTES, template).frame == ("<01 Jan 2025>", "<a>")


def test_a_template_that_draws_lots_is_refused():
    template = ChatTemplate("{{ range(99999) | random }}{{ messages[0].content }}")
    with pytest.raises(InputError, match="makes another prompt of the same message each time"):
        framing.chat(BYTES, template)


def test_plain_framing_changes_nothing():
    sample = sample_of(task("passkey"), PLAIN)
    assert PLAIN.texts(sample) == (sample.context, sample.question)
    assert PLAIN.name == "plain"


def test_through_a_template_the_reply_begins_with_the_beginning_of_the_answer():
    sample = sample_of(task("passkey"), CHAT)
    before, after = CHAT.texts(sample)
    assert CHAT.name == "chat"
    assert before == "<system>Be brief.</><user>" + sample.context
    assert after == "\n\nWhat is the pass key that the text gives?</><assistant>The pass key is"


@settings(max_examples=20)
@given(index=st.integers(0, 10**6), target_tokens=st.integers(5000, 9000))
def test_the_templates_tokens_count_towards_the_target(index, target_tokens):
    for chosen in (task("lines"), task("log-summary")):
        sample = sample_of(chosen, CHAT, index=index, target_tokens=target_tokens)
        assert len(CHAT.ids(sample, query_aware=True).context) + chosen.max_new_tokens <= target_tokens


@pytest.mark.parametrize(("shown", "times"), [("{}{}", 2), ("nothing", 0)])
def test_a_template_that_does_not_show_the_message_once_is_refused(shown, times):
    class Other:
        def render(self, messages, *, add_generation_prompt=True, now=None):
            return shown.format(messages[0]["content"], messages[0]["content"])

    with pytest.raises(InputError, match=f"shows a user's message {times} times, expected once"):
        framing.chat(BYTES, Other())


def test_a_data_set_says_what_was_put_around_its_samples(byte_file, tmp_path):
    tokenizer = load_task_tokenizer(str(byte_file))
    drawn = {"seed": 0, "samples": 2, "target_tokens": 2000, "tokenizer": tokenizer}
    plain, chat = (draw_data_set(task("lines"), **drawn, framing=how) for how in (None, CHAT))
    assert plain == draw_data_set(task("lines"), **drawn, framing=PLAIN)
    assert "frame" not in plain.to_jsonl().splitlines()[0]
    assert chat.digest != plain.digest
    (tmp_path / "chat.jsonl").write_text(chat.to_jsonl())
    assert read_data_set(tmp_path / "chat.jsonl") == chat
    assert chat.frame == ("<system>Be brief.</><user>", "</><assistant>")
