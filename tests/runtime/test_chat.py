"""Messages, templates and where templates are found; transformers' `apply_chat_template` is the oracle."""

from __future__ import annotations

import json
import time
from datetime import datetime

import pytest

from kvc_trt.errors import InputError
from kvc_trt.runtime.chat.messages import check_messages
from kvc_trt.runtime.chat.template import ChatTemplate
from tests.runtime.chat_templates import CHATML, MISTRAL, TEMPLATES

USER = {"role": "user", "content": "Where is  Paris?\n"}
SYSTEM = {"role": "system", "content": " Be brief. "}
ANSWER = {"role": "assistant", "content": "<think>\nA city.\n</think>\n\nIn <France> & \N{SNOWMAN} \U0001f5fc."}
CONVERSATIONS = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "answered": [USER, ANSWER],
    "tool": [USER, ANSWER, {"role": "tool", "content": '{"weather": "<rain>"}', "name": "sky"}],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """A tokenizer of transformers and the directory that it was saved to, by template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def saved(template: str):
        words = {word: index for index, word in enumerate(["[UNK]", *SPECIAL.values()])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **SPECIAL)
        made.chat_template = template
        directory = tmp_path_factory.mktemp("tokenizer")
        made.save_pretrained(directory)
        return made, directory

    return saved


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_rendered_conversations_equal_transformers(family, conversation, oracle):
    from jinja2.exceptions import TemplateError

    tokenizer, directory = oracle(TEMPLATES[family])
    template, messages = ChatTemplate.load(directory), CONVERSATIONS[conversation]
    for opened in (True, False):
        try:
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
        except TemplateError:
            with pytest.raises(InputError, match="refuses these messages: After the optional system message"):
                template.render(messages, add_generation_prompt=opened)
        else:
            assert template.render(messages, add_generation_prompt=opened) == expected


class TestLoad:
    def test_a_directory_without_a_template_has_none(self, tmp_path):
        assert ChatTemplate.load(tmp_path) is None
        (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
        assert ChatTemplate.load(tmp_path) is None

    def test_the_templates_own_file_comes_first(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
        assert ChatTemplate.load(tmp_path).template == "old"
        (tmp_path / "chat_template.jinja").write_text("new")
        assert ChatTemplate.load(tmp_path).render([USER]) == "new"

    def test_the_template_named_default_is_loaded(self, tmp_path):
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}chat"}]
        config = {"chat_template": named, "bos_token": {"content": "<s>", "lstrip": False}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert ChatTemplate.load(tmp_path).render([USER]) == "<s>chat"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[:1]}))
        with pytest.raises(InputError, match=r"no chat_template is named 'default', found \['tool_use'\]"):
            ChatTemplate.load(tmp_path)

    def test_special_tokens_of_older_files_are_read(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ sep_token }}")
        (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>", "sep_token": null}')
        assert ChatTemplate.load(tmp_path).render([USER]) == "<s><end>"

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("chat_template.jinja", b"\xff", "not UTF-8 text"),
            ("chat_template.jinja", b" " * (1 << 20) + b" ", "1048577 B; expected at most 1048576 B"),
            ("tokenizer_config.json", b"[]", "expected a JSON object"),
            ("tokenizer_config.json", b"{", "not valid JSON"),
            ("tokenizer_config.json", b"[" * 100_000, "not valid JSON"),
            ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template must be text, found 3"),
            ("tokenizer_config.json", b'{"chat_template": [[], {}]}', "no chat_template is named 'default'"),
            ("tokenizer_config.json", b'{"chat_template": [{"name": [], "template": "a"}]}', "is named 'default'"),
        ],
    )
    def test_invalid_template_files_are_refused_in_one_line(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message) as raised:
            ChatTemplate.load(tmp_path)
        assert "\n" not in raised.value.message
        assert str(tmp_path / name) in raised.value.message

    def test_a_link_out_of_the_checkpoint_is_refused(self, tmp_path):
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "chat_template.jinja").symlink_to(tmp_path / "secret")
        with pytest.raises(InputError, match="outside of the checkpoint"):
            ChatTemplate.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "expected a list of messages, found 'hello'"),
        ({"role": "user", "content": "a"}, "expected a list of messages"),
        (None, "expected a list of messages, found None"),
        ([], "there is no message"),
        (["hello"], "message 0: expected an object with role and content, found 'hello'"),
        ([[USER]], "message 0: expected an object"),
        ([USER, {"role": "user"}], "message 1: content is missing"),
        ([{"content": "a"}], "message 0: role is missing"),
        ([{"role": "function", "content": "a"}], "role is 'function', expected one of system, user, assistant, tool"),
        ([{"role": ["user"], "content": "a"}], "'role' must be text"),
        ([{"role": "user", "content": None}], "'content' must be text, found None"),
        ([{"role": "user", "content": ""}], "content of the user's message is empty"),
        ([{"role": "user", "content": []}], "content of the user's message is empty"),
        ([{**USER, 3: "a"}], "3 must be text"),
        ([{**USER, "name": ["a"]}], r"'name' must be text, found \['a'\]"),
        ([{"role": "user", "content": "\ud800"}], "half of a character"),
        ([{"role": "user", "content": "a" * (16 << 20)}], "16777220 characters, expected at most 16777216"),
    ],
)
def test_invalid_messages_are_refused_in_one_line(messages, message):
    with pytest.raises(InputError, match=message) as raised:
        check_messages(messages, "chat.json")
    assert raised.value.message.startswith("chat.json: ")
    assert "\n" not in raised.value.message


def test_valid_messages_are_returned_unchanged():
    assert check_messages((USER, SYSTEM, {**USER, "name": "ann"})) == [USER, SYSTEM, {**USER, "name": "ann"}]


def test_a_template_may_be_used_again_and_after_an_error():
    template = ChatTemplate(MISTRAL, special_tokens=SPECIAL)
    for _ in range(2):
        assert template.render([USER]) == "<s>[INST] Where is  Paris?\n[/INST]"
        with pytest.raises(InputError, match="must alternate"):
            template.render([USER, USER])


def test_strftime_now_gives_todays_date():
    text = ChatTemplate("{{ strftime_now('%Y-%m') }}").render([USER])
    assert text in (time.strftime("%Y-%m"), time.strftime("%Y-%m", time.localtime(time.time() - 60)))


def test_a_given_date_is_written_in_place_of_todays():
    template = ChatTemplate("{{ now }}{{ strftime_now('%d %b %Y') }}")
    assert template.render([USER], now=datetime(2024, 2, 29, 12)) == "29 Feb 2024"
    assert template.render([USER]) != "29 Feb 2024"


def test_a_long_message_is_rendered_whole():
    text = ChatTemplate(CHATML).render([{"role": "user", "content": "\N{SNOWMAN}word " * 100_000}])
    assert text.count("\N{SNOWMAN}word ") == 100_000


@pytest.mark.slow
def test_a_real_models_template_renders_as_in_transformers(smollm2_gguf, tmp_path):
    """transformers renders the same GGUF file's template to the same text and token ids."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    from kvc_trt.models.gguf.checkpoint import GgufCheckpoint

    contents = GgufCheckpoint(smollm2_gguf).tokenizer_contents()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    template, tokenizer = ChatTemplate.load(tmp_path), Tokenizer.from_str(contents["tokenizer.json"].decode())
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    for conversation in ("question", "system", "turns", "answered"):
        messages = CONVERSATIONS[conversation]
        for opened in (True, False):
            rendered = template.render(messages, add_generation_prompt=opened)
            assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
            ids = theirs.apply_chat_template(messages, add_generation_prompt=opened, return_dict=False)
            assert tokenizer.encode(rendered, add_special_tokens=False).ids == ids
