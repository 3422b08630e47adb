"""Calls and thoughts in answers, however their text is cut; which form a template asks for; the fields of requests."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.grammar.compiler import Grammars
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.request import Event, Output, Request
from kvc_trt.runtime.sampling.text import Detokeniser
from kvc_trt.serving.protocol.choices import Choice
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.model import ServedModel
from kvc_trt.serving.protocol.tools import (
    PARSERS,
    ToolFormat,
    ToolUse,
    chunk_of,
    format_of,
    message_of,
    tool_use,
)
from kvc_trt.tool_calls.deltas import Arguments, CallStart, Content, Reasoning
from kvc_trt.tool_calls.json_text import JsonText
from kvc_trt.tool_calls.reader import Reader
from tests.runtime.chat_templates import CHATML, HERMES, LLAMA3_TOOLS, MISTRAL_TOOLS, QWEN3
from tests.runtime.grammars.byte_tokenizer import END, byte_tokenizer

NAMES = ("get_weather", "clock")
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOON = '{"name": "clock", "arguments": {}}'


IN_TAGS = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
NOON_IN_TAGS = "<function=clock>\n</function>"
OF_WEATHER = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "now": {"type": "boolean"}, "where": {"type": "object"},
    "unit": {"enum": ["C", "F"]},
}  # fmt: skip
PARAMETERS = {"get_weather": {"type": "object", "properties": OF_WEATHER}, "clock": {}}


def written(parser: str, name: str, arguments: dict, **layout) -> str:
    """Return a call as a model of this form writes it, without its marks."""
    if parser == "qwen3_coder":
        values = (f"<parameter={key}>\n{json.dumps(one, **layout)}\n</parameter>\n" for key, one in arguments.items())
        return f"<function={name}>\n{''.join(values)}</function>"
    if parser == "mistral_args":
        return f"{name}[ARGS]{json.dumps(arguments, **layout)}"
    return json.dumps({"name": name, PARSERS[parser].grammar.arguments: arguments}, **layout)


def reader(parser: str, **settings) -> Reader:
    ids = iter(f"id{index}" for index in range(100))
    return Reader(PARSERS[parser].marks, PARAMETERS, make_id=lambda: next(ids), **settings)


def read(parser: str, *pieces: str, **settings):
    """Return the content, the thoughts and the calls with their arguments that a parser reads from pieces."""
    reading = reader(parser, **settings)
    deltas = [delta for piece in pieces for delta in reading.feed(piece)] + reading.finish()
    message = message_of(deltas)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"], message.get("reasoning_content"), calls


WEATHER_CALL, CLOCK_CALL = ("get_weather", '{"city": "Paris"}'), ("clock", "{}")
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


@pytest.mark.parametrize(("offered", "content", "calls"), [(True, "So:", 1), (False, f"So: [{PARIS}]", 0)])
def test_a_mark_may_be_a_special_token(offered, content, calls):
    """The text of an answer leaves special tokens out; here one is read, and without tools it is still left out."""
    library = byte_tokenizer()
    library.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer = Tokenizer(library.to_str().encode(), "tokenizer.json")
    limits = Limits(library.get_vocab_size(), 500, 500, 1000, capacities=(), prompt_block=1)
    model = ServedModel("mistral", tokenizer, None, limits, frozenset({END}), tool_format=PARSERS["mistral"])
    reading = model.tool_format.reader(tool_use({"tools": TOOLS} if offered else {}), "")
    choice, text = Choice(Endpoint.CHAT, 0, Request(()), model, reader=reading), Detokeniser(tokenizer)
    ids = [*tokenizer.encode(f"So: [TOOL_CALLS][{PARIS}]", add_special_tokens=False).ids, END]
    output = Output((1,), tuple(ids), None, "stop", 1, (1,))
    for token in ids:
        choice.push(Event(0, token, text.push(token), output if token == END else None))
    message = choice.whole()["message"]
    assert (message["content"], len(message.get("tool_calls", []))) == (content, calls)


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

    def test_the_end_of_the_prompt_says_whether_they_have_begun(self):
        form = format_of(ChatTemplate(QWEN3))
        assert form.thinks
        assert form.thinking("<|im_start|>assistant\n<think>\n")
        assert not form.thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert not format_of(ChatTemplate(CHATML)).thinking("<think>")


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


class TestFormats:
    @pytest.mark.parametrize(
        ("template", "parser"),
        [
            (HERMES, "hermes"),
            (LLAMA3_TOOLS, "llama3_json"),
            (MISTRAL_TOOLS, "mistral"),
            (MISTRAL_TOOLS + "{# [TOOL_CALLS]name[ARGS] #}", "mistral_args"),
            (HERMES + "{# <function= #}", "qwen3_coder"),
            (CHATML, "json"),
            (QWEN3, "json"),
        ],
    )
    def test_the_template_determines_the_tool_parser(self, template, parser):
        assert format_of(ChatTemplate(template)).name == parser
        assert format_of(ChatTemplate(CHATML, for_tools=template)).name == parser

    def test_a_named_tool_parser_comes_before_the_templates(self):
        assert format_of(ChatTemplate(HERMES), "mistral").name == "mistral"
        assert format_of(None).name == "json"
        with pytest.raises(InputError, match="unknown tool parser 'herms'; did you mean 'hermes'"):
            format_of(None, "herms")

    def test_mistrals_ids_have_nine_characters(self):
        use = tool_use({"tools": [tool("clock")]})
        for parser, pattern in (("mistral", r"[A-Za-z0-9]{9}"), ("hermes", r"call_[A-Za-z0-9]{24}")):
            made = [PARSERS[parser].make_id() for _ in range(2)]
            assert made[0] != made[1]
            reading = PARSERS[parser].reader(use, "")
            start = reading.feed(f"[TOOL_CALLS][{NOON}]" if parser == "mistral" else f"<tool_call>{NOON}")[0]
            assert re.fullmatch(pattern, start.id)


def tool(name: str):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def named(name: str):
    return {"type": "function", "function": {"name": name}}


SEARCH = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"const": "Paris"}},
        },
    },
}
TOOLS = [tool("clock"), tool("get_weather")]


class TestChoice:
    def names(self, use: ToolUse) -> list[str]:
        return [one["function"]["name"] for one in use.callable_tools]

    def test_tool_choice_sets_the_mode_and_the_tools_offered(self):
        assert tool_use({}) == ToolUse()
        assert tool_use({"tools": []}).offered is None
        assert tool_use({"tools": TOOLS}).mode == "auto"
        use = tool_use({"tools": TOOLS, "tool_choice": "none"})
        assert (use.offered, self.names(use), use.is_forced) == (None, [], False)
        use = tool_use({"tools": TOOLS, "tool_choice": "required"})
        assert (use.is_forced, self.names(use), use.may_call_several) == (True, ["clock", "get_weather"], True)
        assert not tool_use({"tools": TOOLS, "parallel_tool_calls": False}).may_call_several
        assert not tool_use({"tool_choice": "auto"}).offered

    def test_naming_a_tool_forces_a_single_call_of_it(self):
        use = tool_use({"tools": TOOLS, "tool_choice": named("clock")})
        assert use.is_forced
        assert self.names(use) == ["clock"]
        assert not use.may_call_several
        assert len(use.offered) == 2

    def test_allowed_tools_limit_which_tools_are_called(self):
        chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("clock")]}}
        use = tool_use({"tools": TOOLS, "tool_choice": chosen})
        assert (use.is_forced, self.names(use), len(use.offered)) == (True, ["clock"], 2)
        chosen["allowed_tools"]["mode"] = "auto"
        assert not tool_use({"tools": TOOLS, "tool_choice": chosen}).is_forced

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"tools": "clock"}, "tools: expected a list"),
            ({"tools": [{"type": "custom"}]}, "tools: tool 0 has the type 'custom'"),
            ({"tool_choice": "required"}, "tool_choice asks for a call, and there are no tools"),
            ({"tool_choice": named("clock")}, "tool_choice asks for a call"),
            ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice is 'any', expected 'auto', 'none', 'required'"),
            ({"tools": TOOLS, "tool_choice": 3}, "tool_choice is 3, expected"),
            ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice has the type 'custom'"),
            ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice: expected a function with a name"),
            ({"tools": TOOLS, "tool_choice": named("moon")}, "tool_choice names 'moon', and tools has"),
            ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "allowed_tools is None"),
            (
                {
                    "tools": TOOLS,
                    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 3}},
                },
                "tools of allowed_tools is 3",
            ),
            ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ],
    )
    def test_invalid_tool_fields_are_refused_in_one_line(self, fields, message):
        with pytest.raises(InputError, match=message) as raised:
            tool_use(fields)
        assert "\n" not in raised.value.message


@pytest.fixture(scope="module")
def follows():
    """True if an answer of a form may be a text."""
    tokenizer = byte_tokenizer()
    compiler = Grammars(tokenizer, tokenizer.get_vocab_size())

    def may_be(form: ToolFormat, use: ToolUse, text: str, prompt: str = "", given: Grammar | None = None) -> bool:
        matcher = compiler.matcher(form.constrained(use, prompt, given), [END], "tools")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = matcher.prefix(ids) == len(ids)
        for one in ids if whole else ():
            matcher.advance(one)
        return whole and bool(matcher.allowed()[END] or matcher.is_complete)

    return may_be


class TestGrammars:
    @pytest.mark.parametrize("parser", PARSERS)
    def test_forced_calls_are_those_that_are_read(self, parser, follows):
        form = PARSERS[parser]
        calls = [written(parser, "get_weather", {"city": "Paris"}), written(parser, "clock", {})]
        if parser == "qwen3_coder":
            calls[0] = IN_TAGS
        one = form.grammar.before + calls[0] + form.grammar.after
        two = form.grammar.before + form.grammar.between.join(calls) + form.grammar.after
        use = tool_use({"tools": [SEARCH, tool("clock")], "tool_choice": "required"})
        assert read(parser, one)[2] == [WEATHER_CALL]
        assert follows(form, use, one)
        assert follows(form, use, two) == bool(form.grammar.between)
        for wrong in ("Paris", one.replace("Paris", "Rome"), one[:-1], one.replace("get_weather", "rm")):
            assert not follows(form, use, wrong)
        alone = replace(use, name="clock")
        assert not follows(form, alone, one)
        assert follows(form, alone, form.grammar.before + calls[1] + form.grammar.after)
        assert not follows(form, replace(use, parallel=False), two) or not form.grammar.between

    def test_calls_in_tags_obey_the_schema(self, follows):
        properties = {
            "city": {"type": "string"}, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 9},
            "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }  # fmt: skip
        function = {"name": "clock", "parameters": {"properties": properties, "required": ["city", "days"]}}
        use = tool_use({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
        form = PARSERS["qwen3_coder"]

        def call(*values):
            inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
            return f"<tool_call>\n<function=clock>\n{inside}</function>\n</tool_call>"

        city, days = ("city", 'a\n< "b"'), ("days", "3")
        assert follows(form, use, call(city, ("unit", "C"), days, ("near", '"x"')))
        assert follows(form, use, call(city, days))
        for wrong in ((city,), (days, city), (city, ("days", "12")), (city, ("unit", "K"), days), (city, city, days)):
            assert not follows(form, use, call(*wrong))
        for unobeyed, named in (
            ({"properties": {"a": {"type": "string", "pattern": "b+"}}}, "'pattern' of the text 'a'"),
            ({"properties": {}, "anyOf": [{}]}, "'anyOf'"),
            ({"properties": {"a>": {"type": "string"}}}, "the name 'a>'"),
            ({"properties": {}, "required": ["b"]}, "'b', which is required and not described,"),
        ):
            bad = tool_use({"tools": [{"type": "function", "function": {**function, "parameters": unobeyed}}]})
            with pytest.raises(InputError, match=f"tools: parameters of clock: {named} cannot be obeyed"):
                form.constrained(replace(bad, mode="required"), "")

    def test_marks_may_be_special_tokens(self):
        form = PARSERS["mistral_args"]
        use = tool_use({"tools": [tool("clock")], "tool_choice": "required"})
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
        compiler = Grammars(tokenizer, tokenizer.get_vocab_size())
        ids = {mark: tokenizer.token_to_id(mark) for mark in ("[TOOL_CALLS]", "[ARGS]")}
        matcher = compiler.matcher(form.constrained(use, "", None, ids), [END], "tools")
        written = [ids["[TOOL_CALLS]"], *tokenizer.encode("clock").ids, ids["[ARGS]"], *tokenizer.encode("{}").ids]
        for token in written:
            assert matcher.allowed()[token]
            matcher.advance(token)
        assert matcher.allowed()[END]

    def test_thoughts_come_first(self, follows):
        form = replace(PARSERS["json"], thinks=True)
        use = tool_use({"tools": [tool("clock")], "tool_choice": "required"})
        assert follows(form, use, f"<think>\nHm {NOON}</think>\n\n{NOON}")
        assert follows(form, use, NOON)
        assert not follows(form, use, f"Hm.</think>{NOON}")
        assert follows(form, use, f"Hm.</think>{NOON}", "<think>\n")
        assert not follows(form, use, NOON, "<think>\n")
        answer = Grammar.choice(["yes", "no"])
        assert follows(form, ToolUse(), "Hm.</think>no", "<think>", answer)

    def test_either_a_call_or_the_format_is_allowed(self, follows):
        use, form = tool_use({"tools": [tool("clock")]}), PARSERS["hermes"]
        schema = Grammar.json_schema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
        formats = {'{"a": 1}': schema, "yes": Grammar.choice(["yes", "no"]), "{}": Grammar.json_object()}
        for text, wanted in formats.items():
            assert follows(form, use, text, given=wanted)
            assert follows(form, use, f"<tool_call>\n{NOON}\n</tool_call>", given=wanted)
            assert not follows(form, use, "maybe", given=wanted)
        with pytest.raises(InputError, match="tools: the regular expression cannot be followed where a call may come"):
            form.constrained(use, "", Grammar.regex("a+"))

    def test_an_answer_without_tools_is_left_alone(self):
        wanted = Grammar.regex("a+")
        assert PARSERS["hermes"].constrained(ToolUse(), "", wanted) is wanted
        assert PARSERS["hermes"].constrained(tool_use({"tools": TOOLS}), "") is None


def test_chunks_are_openais():
    assert chunk_of(Content("a")) == {"content": "a"}
    assert chunk_of(Reasoning("a")) == {"reasoning_content": "a"}
    assert chunk_of(CallStart(1, "id", "f")) == {
        "tool_calls": [{"index": 1, "id": "id", "type": "function", "function": {"name": "f", "arguments": ""}}]
    }
    assert chunk_of(Arguments(1, "{")) == {"tool_calls": [{"index": 1, "function": {"arguments": "{"}}]}
