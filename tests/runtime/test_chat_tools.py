"""Tools, calls and their results in conversations; transformers' `apply_chat_template` is the oracle."""

from __future__ import annotations

import json

import pytest

from kvc_trt.errors import InputError
from kvc_trt.runtime.chat.messages import DEEPEST, check_messages
from kvc_trt.runtime.chat.template import ChatTemplate, check_variables
from kvc_trt.runtime.chat.tools import MOST_TOOLS, check_tools
from kvc_trt.tool_calls.json_text import begun_object
from tests.runtime.chat_templates import CHATML, HERMES, LLAMA3, MISTRAL, QWEN3, TAGGED, TOOL_TEMPLATES

USER = {"role": "user", "content": "Weather in Paris and Rome?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & here.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def call(name: str, arguments: object, identity: str = "abcdef123"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(made)}


def result(content: str, identity: str = "abcdef123"):
    return {"role": "tool", "content": content, "tool_call_id": identity}


ONE = [USER, calls(call("get_weather", '{"city": "Paris", "days": [1, 2.5, null]}')), result('{"sky": "<clear>"}')]
TWO = [
    {"role": "system", "content": "Be brief."},
    USER,
    calls(call("get_weather", '{"city": "Paris"}'), call("clock", "", "second456"), content="I look."),
    result("rain"),
    result("noon", "second456"),
    {"role": "assistant", "content": "Rain at noon."},
    USER,
]


def apply(template: str, messages, **names):
    """Return the text that transformers makes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **SPECIAL, **names)
    return rendered[0]


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
@pytest.mark.parametrize("messages", [[USER], ONE, TWO], ids=["question", "one", "two"])
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, CLOCK]], ids=["none", "one", "two"])
def test_rendered_tool_calls_equal_transformers(family, messages, tools):
    from jinja2.exceptions import TemplateError

    template = ChatTemplate(TOOL_TEMPLATES[family], special_tokens=SPECIAL)
    as_objects = [
        {
            **message,
            "tool_calls": [
                call(made["function"]["name"], json.loads(made["function"]["arguments"] or "{}"), made["id"])
                for made in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]
    try:
        expected = apply(template.template, as_objects, tools=tools, add_generation_prompt=True)
    except TemplateError as refused:
        with pytest.raises(InputError, match=str(refused)):
            template.render(messages, tools=tools)
    else:
        assert template.render(messages, tools=tools) == expected


def test_the_second_request_of_a_tool_loop_is_accepted():
    """Clients send it so: the answer with all of its fields, then the result."""
    answer = {
        "content": None, "refusal": None, "role": "assistant", "annotations": [], "audio": None, "function_call": None,
        "tool_calls": [call("get_weather", '{"city": "Paris"}')],
    }  # fmt: skip
    text = ChatTemplate(HERMES).render([USER, answer, result("rain")], tools=[WEATHER])
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert text.endswith("<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


CUT = '{"city": "Par'


class TestCutArguments:
    """An answer that max_tokens cut has a call without an end, and agents send it back."""

    @pytest.mark.parametrize("family", TOOL_TEMPLATES)
    def test_cut_arguments_render_as_in_transformers(self, family):
        template = ChatTemplate(TOOL_TEMPLATES[family], special_tokens=SPECIAL)
        messages = [USER, calls(call("get_weather", CUT)), result("no such city")]
        expected = apply(template.template, messages, tools=[WEATHER], add_generation_prompt=True)
        assert template.render(messages, tools=[WEATHER]) == expected
        assert json.dumps(CUT) in expected

    def test_a_template_without_tools_writes_cut_arguments_as_text(self):
        text = ChatTemplate(CHATML).render([USER, calls(call("get_weather", CUT))])
        assert json.dumps({"name": "get_weather", "arguments": CUT}) in text

    def test_a_template_of_objects_alone_gets_what_can_be_read(self):
        text = ChatTemplate(TAGGED).render([USER, calls(call("clock", '{"at": "noon"}'), call("get_weather", CUT))])
        assert "<function=clock>\n<parameter=at>\nnoon\n" in text
        assert "<function=get_weather>\n<parameter=city>\nPar\n</parameter>" in text

    @pytest.mark.parametrize("text", ["[1]", "city", '{"a":' * 100, f'{{"a": "{"a" * (1 << 17)}'])
    def test_a_template_of_objects_alone_refuses_the_rest(self, text):
        with pytest.raises(InputError, match="cannot be rendered"):
            ChatTemplate(TAGGED).render([USER, calls(call("get_weather", text))])

    @pytest.mark.parametrize("text", [CUT, "{", "[1]", "null", "[" * 100_000, '{"a": NaN}', '{"a": "\\ud800"}',
                                      '{"a":' * 100 + "1" + "}" * 100])  # fmt: skip
    def test_arguments_that_are_no_object_stay_text(self, text):
        (message,) = check_messages([calls(call("f", text))])
        assert message["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("[1", None),
        ("city", None),
        ("{", {}),
        (' {"a"', {}),
        ('{"a": ', {}),
        ('{"a": 12', {}),
        ('{"a": 12,', {"a": 12}),
        ('{"a": tru', {}),
        ('{"a": true, "b": "x\\u00', {"a": True, "b": "x"}),
        ('{"a": "b, {', {"a": "b, {"}),
        ('{"a": {"b": [1, 2, {"c": 3, "d', {"a": {"b": [1, 2, {"c": 3}]}}),
        ('{"a": [1, 2', {"a": [1]}),
        ('{"a": [] }', {"a": []}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": 1; "b": 2}', {}),
        ('{"a": "b"; "c": 2}', {"a": "b"}),
    ],
)
def test_the_complete_part_of_a_cut_object_is_read(text, expected):
    assert begun_object(text) == expected


def test_every_prefix_of_an_object_can_be_read():
    whole = {"city": "Par\u00eds", "days": [1, -2.5e3, None, {"a": [True, []]}], "nested": {"b": {}, "c": '\\ "'}}
    text = json.dumps(whole)
    found = [begun_object(text[:length]) for length in range(1, len(text) + 1)]
    assert found[-1] == whole
    sizes = [len(json.dumps(one)) for one in found]
    assert sizes == sorted(sizes)


def test_template_variables_reach_the_template():
    template = ChatTemplate(QWEN3)
    assert "<think>" not in template.render([USER])
    assert template.render([USER], variables={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    nested = ChatTemplate("{{ style.tone[1] }}")
    assert nested.render([USER], variables={"style": {"tone": [1, "calm"]}}) == "calm"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([], r"expected an object, found \[\]"),
        ({"messages": []}, "messages cannot be set from outside"),
        ({"tools": []}, "tools cannot be set from outside"),
        ({"strftime_now": 1}, "strftime_now cannot be set"),
        ({"bos_token": "x"}, "bos_token cannot be set"),
        ({"a b": 1}, "'a b' is not a name of a variable"),
        ({3: 1}, "3 is not a name of a variable"),
        ({"a": {1: 2}}, "a: expected names that are text, found 1"),
        ({"a": float("nan")}, "a: expected a JSON value, found nan"),
        ({"a": 10**400}, "a: expected a JSON value"),
        ({"a": object()}, "a: expected a JSON value, found <object"),
        ({"a": "\ud800"}, "half of a character"),
        ({f"a{index}": 1 for index in range(65)}, "65 variables, expected at most 64"),
    ],
)
def test_invalid_template_variables_are_refused_in_one_line(variables, message):
    with pytest.raises(InputError, match=message) as raised:
        check_variables(variables)
    assert raised.value.message.startswith("chat_template_kwargs: ")
    assert "\n" not in raised.value.message


class TestPlainTemplates:
    """Templates that have no place for tools, such as ChatML's."""

    def test_tools_are_described_in_the_system_message(self):
        text = ChatTemplate(CHATML).render([USER], tools=[WEATHER])
        assert text.startswith("<|im_start|>system\nYou may call these tools:\n")
        assert json.dumps(WEATHER["function"]) in text
        assert "You are helpful" not in text
        text = ChatTemplate(CHATML).render(TWO, tools=[WEATHER])
        assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call these tools:\n")

    def test_a_plain_template_writes_calls_and_results_as_text(self):
        text = ChatTemplate(CHATML).render(TWO, tools=[WEATHER])
        assert (
            '<|im_start|>assistant\nI look.\n[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
            '{"name": "clock", "arguments": {}}]<|im_end|>\n'
            "<|im_start|>user\nResult of get_weather: rain\nResult of clock: noon<|im_end|>\n"
        ) in text
        without = ChatTemplate(CHATML).render(ONE)
        assert "You may call" not in without
        assert '{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2.5, null]}}<|im_end|>' in without

    def test_a_plain_template_keeps_roles_alternating(self):
        text = ChatTemplate(MISTRAL, special_tokens=SPECIAL).render([*TWO[:5]], tools=[WEATHER, CLOCK])
        assert text.endswith("Result of get_weather: rain\nResult of clock: noon[/INST]")


def test_a_model_may_have_a_template_for_tools(tmp_path):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template.render([USER]) == ChatTemplate(CHATML).render([USER])
    assert template.render([USER], tools=[WEATHER]) == ChatTemplate(HERMES).render([USER], tools=[WEATHER])
    assert template.render(ONE) == ChatTemplate(HERMES).render(ONE)
    named[1]["template"] = 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(InputError, match="chat_template must be text, found 3"):
        ChatTemplate.load(tmp_path)


def test_messages_of_clients_are_converted_for_templates():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": None}]
    assert check_messages(given) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
    ]
    without_content = {"role": "assistant", "tool_calls": [call("f", {"a": 1})]}
    assert check_messages([without_content])[0]["content"] is None
    assert check_messages([{"role": "tool", "content": ""}]) == [{"role": "tool", "content": ""}]


def deep(levels: int) -> dict:
    return {"a": deep(levels - 1)} if levels else {}


NO_CALLS = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (NO_CALLS, "'content' must be text, found None"),
        ({**NO_CALLS, "tool_calls": []}, "'content' must be text, found None"),
        ({"role": "assistant", "tool_calls": None}, "content is missing"),
        ({**NO_CALLS, "tool_calls": "f()"}, r"tool_calls: expected a list of calls, found 'f\(\)'"),
        ({**NO_CALLS, "tool_calls": ["f()"]}, "call 0 of tool_calls: expected an object with id, type and function"),
        (calls({**call("f", "{}"), "type": "custom"}), "call 0 of tool_calls has the type 'custom'"),
        (calls({"id": "a", "type": "function"}), "function: expected an object with name and arguments, found None"),
        (calls(call("f", "{}"), call("f", [1])), "call 1 of tool_calls: arguments of function: expected a JSON object"),
        (calls(call("f", deep(100))), f"nested more than {DEEPEST} levels deep"),
        (calls(call("f", {"a": float("nan")})), "expected a JSON value, found nan"),
        (calls(call("f", "\ud800")), "half of a character"),
        (calls(call("f", None)), "expected a JSON object, found None"),
        (calls(call(3, "{}")), "name of function must be text, found 3"),
        (calls(call("f", "{}", 7)), "id must be text, found 7"),
        ({**USER, "tool_calls": [call("f", "{}")]}, "tool_calls in a message of the role user"),
        ({**USER, "tool_calls": []}, "tool_calls in a message of the role user"),
        (result("rain", "other"), "tool_call_id is 'other', and no message before it has such a call"),
        ({"role": "tool", "content": None}, "'content' must be text, found None"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "part 0 of content has the type 'image_url'"),
        ({"role": "user", "content": ["a"]}, "part 0 of content: expected an object with type and text"),
        ({"role": "user", "content": [{"type": "text"}]}, "part 0 of content: 'text' must be text, found None"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "function_call is not supported"),
        ({"role": "assistant", "content": "a", "audio": {"id": "a"}}, "audio is not supported: the model reads text"),
    ],
)  # fmt: skip
def test_invalid_tool_calls_in_a_history_are_refused_in_one_line(message, error):
    with pytest.raises(InputError, match=error) as raised:
        check_messages([USER, message], "messages")
    assert raised.value.message.startswith("messages: message 1")
    assert "\n" not in raised.value.message


def function(**changes):
    return [{"type": "function", "function": {**WEATHER["function"], **changes}}]


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ("clock", "expected a list of tools, found 'clock'"),
        (["clock"], "tool 0: expected an object with type and function"),
        ([{"type": "web_search"}], "tool 0 has the type 'web_search', expected 'function'"),
        ([{"type": "function"}], "tool 0: function: expected an object with name and parameters, found None"),
        (function(name=None), "tool 0: name of function is None"),
        (function(name="a b"), "name of function is 'a b', expected 1 to 64 letters"),
        (function(name="a" * 65), "expected 1 to 64 letters"),
        (function(description=3), "description of function is 3, expected text"),
        (function(parameters="object"), "parameters of function is 'object', expected a JSON schema"),
        (function(strict="yes"), "strict of function is 'yes', expected true or false"),
        (function(parameters={"a": {1: 2}}), "expected names that are text"),
        ([CLOCK, WEATHER, CLOCK], "two tools have the name 'clock'"),
        ([CLOCK] * (MOST_TOOLS + 1), "129 tools, expected at most 128"),
        (function(description="a" * (1 << 20)), "characters, expected at most 1048576"),
    ],
)
def test_invalid_tools_are_refused_in_one_line(tools, error):
    with pytest.raises(InputError, match=error) as raised:
        check_tools(tools)
    assert raised.value.message.startswith("tools: ")
    assert "\n" not in raised.value.message


def test_strict_is_left_out_of_the_prompt():
    assert check_tools(function(strict=True)) == [WEATHER]
    assert check_tools(function(strict=None, description=None))[0]["function"].keys() == {"name", "parameters"}


def test_a_template_of_tools_gets_none_where_none_are_given():
    assert "ipython" not in ChatTemplate(LLAMA3).render([USER], tools=[])
