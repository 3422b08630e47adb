"""The form that a template asks for; the tools of a request, the grammars of their calls, and their chunks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

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
from kvc_trt.serving.protocol.tools import PARSERS, ToolFormat, ToolUse, chunk_of, format_of, tool_use
from kvc_trt.tool_calls.deltas import Arguments, CallStart, Content, Reasoning
from tests.runtime.chat_templates import CHATML, HERMES, LLAMA3_TOOLS, MISTRAL_TOOLS, QWEN3
from tests.runtime.grammars.byte_tokenizer import END, byte_tokenizer
from tests.tool_calls.written_calls import IN_TAGS, NOON, PARIS, WEATHER_CALL, read, written


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

    def test_the_end_of_the_prompt_says_whether_they_have_begun(self):
        form = format_of(ChatTemplate(QWEN3))
        assert form.thinks
        assert form.thinking("<|im_start|>assistant\n<think>\n")
        assert not form.thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert not format_of(ChatTemplate(CHATML)).thinking("<think>")


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
