"""Calls and thoughts in answers, however their text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvc_trt.serving.protocol.tools import PARSERS, ToolUse
from kvc_trt.tool_calls.deltas import Arguments, CallStart, Content
from kvc_trt.tool_calls.json_text import JsonText
from tests.tool_calls.written_calls import (
    CLOCK_CALL,
    IN_TAGS,
    NAMES,
    NOON,
    NOON_IN_TAGS,
    PARIS,
    WEATHER_CALL,
    read,
    reader,
    written,
)

ANSWERS = {
    "one": ("hermes", f"<tool_call>\n{PARIS}\n</tool_call>", None, [WEATHER_CALL]),
    "text before": ("hermes", f"I look.\n\n<tool_call>\n{PARIS}\n</tool_call>\n", "I look.", [WEATHER_CALL]),
    "two": (
        "hermes",
        f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{NOON}\n</tool_call>",
        None,
        [WEATHER_CALL, CLOCK_CALL],
    ),
    "text between": (
        "hermes",
        f"<tool_call>{PARIS}</tool_call> and <tool_call>{NOON}</tool_call> too",
        " and too",
        [WEATHER_CALL, CLOCK_CALL],
    ),
    "a list": ("hermes", f"<tool_call>[{PARIS}, \n{NOON}]</tool_call>", None, [WEATHER_CALL, CLOCK_CALL]),
    "no end": ("hermes", f"<tool_call>\n{PARIS}", None, [WEATHER_CALL]),
    "no end, and another": ("hermes", f"<tool_call>{PARIS}\n<tool_call>{NOON}", None, [WEATHER_CALL, CLOCK_CALL]),
    "a brace too many": ("hermes", f"<tool_call>{PARIS}}}</tool_call>", "}</tool_call>", [WEATHER_CALL]),
    "llama": ("llama3_json", '{"name": "clock", "parameters": {"a": 1}}', None, [("clock", '{"a": 1}')]),
    "llama, marked": ("llama3_json", f"<|python_tag|>{NOON}", None, [CLOCK_CALL]),
    "llama, two": ("llama3_json", f"{PARIS}; {NOON}", None, [WEATHER_CALL, CLOCK_CALL]),
    "llama, typed": ("llama3_json", f'{{"type": "function", {NOON[1:]}', None, [CLOCK_CALL]),
    "mistral": ("mistral", f"[TOOL_CALLS][{PARIS}, {NOON}]", None, [WEATHER_CALL, CLOCK_CALL]),
    "mistral, without its special token": ("mistral", f" [{PARIS}]", None, [WEATHER_CALL]),
    "mistral, text before": ("mistral", f"So: [TOOL_CALLS] [{NOON}]", "So:", [CLOCK_CALL]),
    "mistral, brackets": ("mistral", "[TOOL] [1]", "[TOOL] [1]", []),
    "mistral, newer": (
        "mistral_args",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[ARGS]{}',
        None,
        [WEATHER_CALL, CLOCK_CALL],
    ),
    "mistral, with an id": ("mistral_args", "So: [TOOL_CALLS]clock[CALL_ID]a1B2[ARGS] {}", "So:", [CLOCK_CALL]),
    "mistral, newer model and older form": ("mistral_args", f"[TOOL_CALLS][{PARIS}]", None, [WEATHER_CALL]),
    "tags": ("qwen3_coder", f"<tool_call>\n{IN_TAGS}\n</tool_call>", None, [WEATHER_CALL]),
    "tags, two": (
        "qwen3_coder",
        f"I look.\n<tool_call>{IN_TAGS}</tool_call>\n<tool_call>\n{NOON_IN_TAGS}\n</tool_call>",
        "I look.",
        [WEATHER_CALL, CLOCK_CALL],
    ),
    "tags, values by the schema": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>12</parameter>\n<parameter=days>\n12\n</parameter>"
        '<parameter=now>True</parameter><parameter=where>\n{"a": [1]}\n</parameter><parameter=unit>F</parameter>'
        "<parameter=other>a b\n</parameter></function></tool_call>",
        None,
        [
            (
                "get_weather",
                '{"city": "12", "days": 12, "now": true, "where": {"a": [1]}, "unit": "F", "other": "a b"}',
            )
        ],
    ),
    "tags, a text of several lines": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\na < b\n</par>\n\n</parameter>\n</function>",
        None,
        [("get_weather", json.dumps({"city": "\na < b\n</par>\n"}))],
    ),
    "tags, a value that ends like its tag": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city></parameter</parameter></function>",
        None,
        [("get_weather", json.dumps({"city": "</parameter"}))],
    ),
    "json": ("json", NOON, None, [CLOCK_CALL]),
    "json, a list": ("json", f"[{NOON},{PARIS}]", None, [CLOCK_CALL, WEATHER_CALL]),
    "json, fenced": ("json", f"Here:\n```json\n{NOON}\n```\n", "Here:", [CLOCK_CALL]),
    "arguments first": ("json", '{"arguments": {"a": [1]}, "name": "clock"}', None, [("clock", '{"a": [1]}')]),
    "arguments as text": (
        "json",
        '{"name": "clock", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}',
        None,
        [("clock", '{"a": "\N{LATIN SMALL LETTER E WITH ACUTE}"}')],
    ),
    "no arguments": ("json", '{"name": "clock"}', None, [CLOCK_CALL]),
    "null for arguments": ("json", '{"name": "clock", "arguments": null}', None, [CLOCK_CALL]),
    "nested arguments": (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {"a": {"b": ["</tool_call>", "\\"}", {}]}}}</tool_call>',
        None,
        [("clock", '{"a": {"b": ["</tool_call>", "\\"}", {}]}}')],
    ),
}
NO_CALLS = {
    "plain": ("hermes", "  Hello \N{SNOWMAN}\n\n there. \n"),
    "an unknown tool": ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    "no json": ("hermes", "<tool_call>get_weather(Paris)</tool_call>"),
    "python": ("llama3_json", "<|python_tag|>print(1)"),
    "a mark alone": ("hermes", "a < b <tool_cal"),
    "an open mark": ("hermes", "Use <tool_call>"),
    "cut before its arguments": ("hermes", '<tool_call>\n{"name": "clock", "argu'),
    "an empty list": ("mistral", "[TOOL_CALLS][]"),
    "a list of words": ("mistral", "[TOOL_CALLS][1]"),
    "newer, an unknown tool": ("mistral_args", "[TOOL_CALLS]rm[ARGS]{}"),
    "newer, no arguments": ("mistral_args", "[TOOL_CALLS]clock"),
    "newer, no object": ("mistral_args", "[TOOL_CALLS]clock[ARGS][1]"),
    "newer, another mark": ("mistral_args", "[TOOL_CALLS]clock[INST]{}"),
    "tags, an unknown tool": ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
    "tags, text": ("qwen3_coder", "<tool_call>\nclock\n</tool_call>"),
    "tags without their mark": ("qwen3_coder", NOON_IN_TAGS),
    "tags, cut in its name": ("qwen3_coder", "<tool_call>\n<function=clo"),
    "another object": ("json", '{"title": "A", "name": "clock"}'),
    "arguments that are no object": ("json", '{"name": "clock", "arguments": [1]}'),
    "arguments as another text": ("json", '{"name": "clock", "arguments": "now"}'),
    "two names": ("json", '{"name": "clock", "name": "clock", "arguments": {}}'),
    "nameless": ("json", '{"type": "function"}'),
    "a call in the middle": ("json", f"It is {NOON}"),
    "a colon too many": ("json", '{"name":: "clock"}'),
    "a line break in a text": ("json", '{"name": "clo\nck"}'),
    "code": ("json", "```json\n{}\n```\n"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_calls_are_read_whole_and_character_by_character(answer):
    parser, text, content, calls = ANSWERS[answer]
    assert read(parser, text) == (content, None, calls)
    assert read(parser, *text) == (content, None, calls)


@pytest.mark.parametrize("answer", NO_CALLS)
def test_text_that_is_no_call_stays_content_to_the_character(answer):
    parser, text = NO_CALLS[answer]
    assert read(parser, text) == (text, None, [])
    assert read(parser, *text) == (text, None, [])


def test_arguments_come_as_they_are_written():
    reading = reader("hermes")
    assert reading.feed('<tool_call>{"name": "get_weather", "arg') == []
    assert reading.feed('uments": {"ci') == [CallStart(0, "id0", "get_weather"), Arguments(0, '{"ci')]
    assert reading.feed('ty": "Pa') == [Arguments(0, 'ty": "Pa')]
    assert reading.feed('ris"}') == [Arguments(0, 'ris"}')]
    assert reading.feed("}\n</tool_call>") == []
    assert reading.feed("\nSo \n") == [Content("\nSo")]
    assert reading.finish() == []
    assert reading.has_calls


def test_a_call_that_breaks_off_keeps_what_was_announced():
    begun = '<tool_call>{"name": "clock", "arguments": {"a": '
    assert read("hermes", begun) == (None, None, [("clock", '{"a": ')])
    assert read("hermes", begun + "oh no}</tool_call>") == ("oh no}</tool_call>", None, [("clock", '{"a": ')])


def test_nothing_counts_after_the_only_call():
    reading = reader("mistral", parallel=False)
    deltas = reading.feed(f"[{PARIS}, {NOON}] and so on") + reading.finish()
    assert deltas == [CallStart(0, "id0", "get_weather"), Arguments(0, '{"city": "Paris"}')]


def test_without_tools_nothing_is_a_call():
    text = f"<tool_call>{PARIS}</tool_call>"
    reading = PARSERS["hermes"].reader(ToolUse(), "")
    assert reading.feed(text) + reading.finish() == [Content(text)]
    assert not reading.has_calls


class TestThoughts:
    def test_thoughts_that_the_model_begins_are_read(self):
        text = f"<think>\nParis, so\n I < look.\n</think>\n\nWell.\n<tool_call>{NOON}</tool_call>"
        expected = ("Well.", "Paris, so\n I < look.", [CLOCK_CALL])
        assert read("hermes", text, thinks=True) == read("hermes", *text, thinks=True) == expected

    def test_thoughts_that_the_prompt_has_begun_are_read(self):
        assert read("hermes", "Hm, </thin> </think>Hi.", thinks=True, thinking=True) == ("Hi.", "Hm, </thin>", [])
        assert read("hermes", "\n\nHm", thinks=True, thinking=True) == ("", "Hm", [])

    def test_an_answer_without_thoughts_has_none(self):
        assert read("hermes", "<think>\n\n</think>\n\nHi.", thinks=True) == ("Hi.", None, [])
        assert read("hermes", " Hi <think>a</think>", thinks=True) == (" Hi <think>a</think>", None, [])
        assert read("hermes", "<think>a</think>") == ("<think>a</think>", None, [])

    def test_a_bare_call_after_thoughts_is_read(self):
        assert read("json", f"<think>a</think>\n{NOON}", thinks=True) == (None, "a", [CLOCK_CALL])


PARTS = st.sampled_from(
    [
        "[ARGS]", "clock", "<function=clock>", "<parameter=a>", "</parameter>", "</function>",
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "```json", "```", "<think>", "</think>", PARIS,
        NOON, "{", "}", "[", "]", ",", ";", ":", " ", "\n", "text", '"', "<", '{"name": "clock", ',
        '"arguments": {"a": ', "1.5e3", "tru", "null", "\\u00", "\N{SNOWMAN}",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(
    st.sampled_from(list(PARSERS)), st.lists(PARTS, max_size=14).map("".join), st.lists(st.integers(0, 400)),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_an_answer_cut_anywhere_is_read_the_same(parser, text, cuts, thinks, thinking, parallel):
    options = {"thinks": thinks or thinking, "thinking": thinking, "parallel": parallel}
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[first:last] for first, last in pairwise(places)]
    assert read(parser, *pieces, **options) == read(parser, text, **options)


@settings(max_examples=200)
@given(st.sampled_from(list(PARSERS)), st.lists(PARTS, max_size=14).map("".join), st.booleans())
def test_no_character_is_lost_or_repeated(parser, text, thinking):
    """Whatever is no white space, no mark and no frame of a call comes out once, and in order."""
    content, reasoning, calls = read(parser, text, thinks=thinking, thinking=thinking)
    said = (reasoning or "") + (content or "")
    if not calls and not thinking:
        assert said == text
    elif not calls:
        assert "".join(said.split()) == "".join(text.replace("</think>", "", 1).split())
    else:
        assert len(said) + sum(len(arguments) for _, arguments in calls if arguments != "{}") <= len(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(
    st.sampled_from(list(PARSERS)),
    st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=3), VALUES, max_size=3)), min_size=1),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_calls_come_back_as_they_were_written(parser, made, indent, escaped):
    form = PARSERS[parser].grammar
    if parser == "qwen3_coder":
        assume(all(key == key.strip() and key and ">" not in key for _, arguments in made for key in arguments))
    said = [written(parser, name, arguments, indent=indent, ensure_ascii=escaped) for name, arguments in made]
    text = form.before + (form.between or "; ").join(said) + form.after
    content, _, calls = read(parser, text)
    assert content is None
    assert [(name, json.loads(arguments)) for name, arguments in calls] == made


JSON_PIECES = st.lists(st.sampled_from(list('{}[]",:0123456789-+.eEtruefalsn\\/ \nx\t')), max_size=12).map("".join)


@settings(max_examples=500)
@given(VALUES.map(json.dumps) | JSON_PIECES)
def test_json_is_what_json_loads_takes(text):
    text = text.lstrip()
    scanner = JsonText()
    taken = all(map(scanner.push, text.rstrip())) and scanner.is_whole
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
        expected = True
    except (ValueError, ZeroDivisionError):
        expected = False
    assert taken == expected
