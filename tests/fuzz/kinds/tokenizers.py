"""The tokenizer's files: tokenizer.json, tokenizer_config.json, and the chat template and its messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvc_trt.errors import InputError
from kvc_trt.files.held import HeldFile
from kvc_trt.models.sources.tokenizer import check_tokenizer, held_tokenizer
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.sampling.text import Detokeniser
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from tests.conftest import TINY_MODEL
from tests.fuzz.kind import Kind
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import JSON, of_trees
from tests.readable_model import with_template

TEXTS = ("", "a", "hello world", "naïve café 中文 🙂", " \n\t ", "<s>x</s>", "0123456789" * 20, "\0", "a" * 300)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is {{ 7 * 7 }}?"}]
LARGEST_ID = (1 << 32) - 1


class TokenizerJson(Kind):
    name = "tokenizer"
    native = True
    mutators = (*RAW, *[of_trees(JSON)] * 16)

    def seeds(self) -> Sequence[bytes]:
        """One file for each model and for most of the parts that go around it."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

        def trained(model: object, trainer: object, pre_tokenizer: object) -> Tokenizer:
            tokenizer = Tokenizer(model)
            tokenizer.pre_tokenizer = pre_tokenizer
            tokenizer.train_from_iterator([*TEXTS, "hello hello world"] * 2, trainer)
            return tokenizer

        special = ["<unk>", "<s>", "</s>"]
        options = {"special_tokens": special, "show_progress": False, "vocab_size": 90}
        bpe = trained(
            models.BPE(unk_token="<unk>"),
            trainers.BpeTrainer(**options),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        bpe.decoder, bpe.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
        unigram = trained(
            models.Unigram(), trainers.UnigramTrainer(unk_token="<unk>", **options), pre_tokenizers.Metaspace()
        )
        unigram.decoder, unigram.normalizer = decoders.Metaspace(), normalizers.NFKC()
        pieces = trained(
            models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(**options), pre_tokenizers.Whitespace()
        )
        pieces.decoder = decoders.WordPiece()
        pieces.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        words = trained(
            models.WordLevel(unk_token="<unk>"),
            trainers.WordLevelTrainer(**options),
            pre_tokenizers.Split(" ", "isolated"),
        )
        words.enable_truncation(8)
        words.enable_padding(length=4)
        return [tokenizer.to_str().encode() for tokenizer in (bpe, unigram, pieces, words)]

    def specimens(self) -> Sequence[bytes]:
        return [b"{}", b"[" * 100_000, b"null", b'{"model":' * 1000]

    def read(self, content: bytes) -> None:
        path = self.file(content, "tokenizer.json")
        check_tokenizer([path], 1 << 31)
        tokenizer = held_tokenizer(HeldFile(path))
        for text in TEXTS:
            for special in (True, False):
                ids = list(tokenizer.encode(text, add_special_tokens=special).ids)
                tokenizer.decode(ids, skip_special_tokens=True)
            pieces = Detokeniser(tokenizer)
            for token in ids[:40]:
                pieces.push(token)
            pieces.flush()
        for token in (0, 1, 89, 1000, LARGEST_ID):
            tokenizer.id_to_token(token)
            tokenizer.decode([token])
        tasks = load_task_tokenizer(str(path))
        tasks.unknown_word("hello"), tasks.encode("hello"), tasks.vocabulary_size


_EXPRESSIONS = (
    "{{ messages }}", "{{ messages[0]['role'] }}", "{% for m in messages %}", "{% endfor %}", "{{ bos_token }}", "{{",
    "}}", "{%", "%}", "{{ ''.__class__.__mro__ }}", "{{ lipsum(10**8) }}", "{{ range(10**9)|list }}",
    "{{ 'a' * 10**9 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ 10 ** 10 ** 9 }}",
    "{{ raise_exception('no') }}", "{{ undefined.x }}", "{% include 'x' %}", "{% import 'os' as os %}",
    "{{ strftime_now('%' * 1000) }}", "{{ messages|tojson }}", "{{ 1 / 0 }}",
    "{% set x = namespace(y=1) %}{{ x.y }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "\x1b[2J",
    "{{ '\\ud800' }}", "{{ messages|map(attribute='content')|join }}", "{{ cycler.__init__.__globals__ }}",
    "{{ 'x'|center(10**9) }}", "{{ '%1000000000d'|format(1) }}", "{{ '{0:>999999999}'.format(1) }}", "{% raw %}",
    "{{ dict(a=1).pop }}", "{#",
)  # fmt: skip


def _insert_expression(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    place = random.randint(0, len(content))
    return content[:place] + random.choice(_EXPRESSIONS).encode() + content[place:]


class Template(Kind):
    """chat_template.jinja: a stranger's program, which a process with limits runs."""

    name = "chat-template"
    mutators = (*RAW, *[_insert_expression] * 6)

    def seeds(self) -> Sequence[bytes]:
        return [
            b"{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}",
            b"{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            b"{{ m['content'] | trim }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
        ]

    def specimens(self) -> Sequence[bytes]:
        return [expression.encode() for expression in _EXPRESSIONS if expression.endswith("}")]

    def read(self, content: bytes) -> str:
        self.file(content, "chat_template.jinja")
        (self.folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
        template = ChatTemplate.load(self.folder)
        assert template is not None
        return template.render(MESSAGES)


class TokenizerConfig(Kind):
    """tokenizer_config.json: the template and the special tokens in it. Rendering is for `chat-template`."""

    name = "tokenizer-config"
    mutators = (*RAW, *[of_trees(JSON)] * 12)

    def seeds(self) -> Sequence[bytes]:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        named = [{"name": "default", "template": template}, {"name": "tools", "template": "{{ tools }}"}]
        tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": None}
        return [json.dumps({**tokens, "chat_template": chat}).encode() for chat in (template, named, None)]

    def specimens(self) -> Sequence[bytes]:
        return [b"[" * 100_000, json.dumps({"chat_template": [{"name": "x" * 100_000, "template": 5}]}).encode()]

    def read(self, content: bytes) -> ChatTemplate | None:
        self.file(content, "tokenizer_config.json")
        return ChatTemplate.load(self.folder)


class Messages(Kind):
    """The file of --messages, rendered by a model's template."""

    name = "messages"
    mutators = (*RAW, *[of_trees(JSON)] * 12)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY_MODEL))
        self._template = ChatTemplate.load(with_template(model, folder / "chat"))

    def seeds(self) -> Sequence[bytes]:
        turns = [*MESSAGES, {"role": "assistant", "content": "49"}, {"role": "user", "content": "Why?", "name": "me"}]
        return [json.dumps(value).encode() for value in (MESSAGES, turns, [MESSAGES, turns])]

    def specimens(self) -> Sequence[bytes]:
        long = [{"role": "user", "content": "x" * (17 << 20)}]
        many = [{"role": "user", "content": "x"}] * 100_000
        return [json.dumps(long).encode(), json.dumps(many).encode(), b"[" * 100_000, b"[]", b"[[]]", b"{}"]

    def read(self, content: bytes) -> list[str]:
        from kvc_trt.cli.options.prompts import read_messages

        conversations = read_messages(self.file(content, "messages.json"), None)
        if self._template is None:
            raise InputError("no template")
        return [self._template.render(conversation) for conversation in conversations]


KINDS = (TokenizerJson, Template, TokenizerConfig, Messages)
