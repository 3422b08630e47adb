"""The tokenizer of a GGUF file against transformers' own reading of it, and against the original tokenizers."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from kvc_trt.errors import InputError
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.models.gguf.tiny import ALIKE, SPECIAL, TEMPLATE, TEXTS, vocabulary, write


@pytest.fixture
def contents(tmp_path):
    def read(**options):
        return GgufCheckpoint(write(tmp_path / "model.gguf", **options)).tokenizer_contents()

    return read


OTHERS = {"chatglm-bpe", "command-r", "falcon", "glm4", "olmo", "refact", "smollm", "starcoder"}
"""Rules that transformers' reading of GGUF files does not know; it splits such text as GPT-2's."""


@pytest.mark.parametrize("name", sorted(set(PRE_TOKENIZERS) - OTHERS))
@pytest.mark.parametrize("begins", [False, True])
def test_ids_are_those_of_transformers(name, begins, contents, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = contents(pre=name, changes={"tokenizer.ggml.add_bos_token": begins})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    tokenizer = Tokenizer.from_str(ours["tokenizer.json"].decode())
    for text in TEXTS:
        expected = theirs(text).input_ids
        encoded = tokenizer.encode(text)
        assert encoded.ids == expected
        assert tokenizer.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == theirs.decode(expected)
        assert tokenizer.decode(encoded.ids) == theirs.decode(expected, skip_special_tokens=True)
    config = json.loads(ours["tokenizer_config.json"])
    assert {name: config[name] for name in ("bos_token", "eos_token")} == {
        "bos_token": theirs.bos_token, "eos_token": theirs.eos_token,
    }  # fmt: skip
    assert ours["chat_template.jinja"].decode() == theirs.chat_template == TEMPLATE


@pytest.mark.parametrize("name", ["smollm", "qwen2"])
def test_the_files_are_read_by_transformers_as_a_directory(name, contents, tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = tmp_path / "directory"
    directory.mkdir()
    for file, content in contents(pre=name).items():
        (directory / file).write_bytes(content)
    loaded = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    messages = [{"role": "user", "content": "Hi"}]
    rendered = loaded.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"
    for text in (*TEXTS, rendered):
        assert loaded(text).input_ids == tokenizer.encode(text).ids
    assert transformers.GenerationConfig.from_pretrained(directory).eos_token_id == [2]


def test_smollm_has_single_digits_and_keeps_the_spaces_before_them(contents):
    """The pieces match the model's own tokenizer.json: digits apart first, then GPT-2's pieces between them."""
    tokenizer = Tokenizer.from_str(contents(pre="smollm")["tokenizer.json"].decode())
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    pieces = [piece for piece, _ in split("in 2024:\n\n1.  7")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", ":", "ĊĊ", "1", ".", "ĠĠ", "7"]


def pieces(contents, name, text):
    """Return the pieces of a text, composed as the rule composes it."""
    tokenizer = Tokenizer.from_str(contents(pre=name)["tokenizer.json"].decode())
    composed = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(composed)]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("command-r", "CohereTokenizer"), ("olmo", "GPTNeoXTokenizer"), ("qwen35", "Qwen3_5Tokenizer")],
)
def test_ids_are_those_of_the_familys_own_class(name, theirs, contents):
    transformers = pytest.importorskip("transformers")
    made = contents(pre=name, changes={"tokenizer.ggml.token_type": [1] * len(vocabulary()[0])})
    ours = Tokenizer.from_str(made["tokenizer.json"].decode())
    tokens, merges = vocabulary()
    words = {token: number for number, token in enumerate(tokens)}
    own = getattr(transformers, theirs)(vocab=words, merges=[tuple(merge.split(" ")) for merge in merges])
    for text in (ALIKE, "cafe\u0301", "in 2024:\n\n1.  7", "  lead", "हिन्दी, नमस्ते"):
        assert ours.encode(text).ids == own(text, add_special_tokens=False).input_ids


def test_pieces_of_rules_without_another_reader_are_the_expected_ones(contents):
    text = "it's 12345 + x..., \n\nyes"
    for name in ("glm4", "chatglm-bpe"):
        assert pieces(contents, name, text) == pieces(contents, "llama3", text)
    for name in ("refact", "starcoder"):
        assert pieces(contents, name, text) == pieces(contents, "smollm", text)
    assert pieces(contents, "falcon", "it's 12345 x..., yes(2)") == [
        "it", "'", "s", "Ġ", "123", "45", "Ġx", "...,", "Ġyes", "(", "2", ")",
    ]  # fmt: skip


def test_qwen35_leaves_marks_with_their_letters(contents):
    word = "नमस्ते"
    assert len(pieces(contents, "qwen35", word)) == 1 < len(pieces(contents, "qwen2", word))


def test_qwen2_composes_and_llama3_takes_whole_pieces(contents):
    qwen = Tokenizer.from_str(contents(pre="qwen2")["tokenizer.json"].decode())
    assert qwen.encode("cafe\u0301").ids == qwen.encode("café").ids
    llama = json.loads(contents(pre="llama-bpe", absent=("tokenizer.ggml.add_bos_token",))["tokenizer.json"])
    assert llama["model"]["ignore_merges"] is True
    assert llama["post_processor"]["single"][0] == {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}


def test_control_tokens_are_special_and_user_defined_ones_whole(contents):
    tokens, _ = vocabulary()
    changed = [*tokens[:-1], "<think>"]
    types = [3 if token in SPECIAL else 4 if token == "<think>" else 1 for token in changed]
    merges = [merge for merge in vocabulary()[1] if merge.replace(" ", "") in changed]
    made = contents(tokens=changed, changes={"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges})
    tokenizer = Tokenizer.from_str(made["tokenizer.json"].decode())
    ids = tokenizer.encode("a<think><|im_end|>").ids
    assert ids[1:] == [len(tokens) - 1, 2]
    assert tokenizer.decode(ids) == "a<think>"


def test_without_types_the_named_tokens_are_special(contents):
    tokenizer = Tokenizer.from_str(contents(absent=("tokenizer.ggml.token_type",))["tokenizer.json"].decode())
    assert tokenizer.encode("<|im_start|><|im_end|>").ids == [1, 2]
    assert tokenizer.encode("<|endoftext|>").ids != [0]


def test_a_file_without_a_template_has_none(contents):
    assert "chat_template.jinja" not in contents(absent=("tokenizer.chat_template",))


def test_tokenizers_that_do_not_read_back_are_refused(contents):
    with pytest.raises(InputError, match=r"chat_template\.jinja of its metadata: 2\.0 MiB, expected at most 1\.0 MiB"):
        contents(changes={"tokenizer.chat_template": "a" * (2 << 20)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"absent": ("tokenizer.ggml.model",)}, "model is missing, expected gpt2 (byte-level BPE) or llama"),
        ({"changes": {"tokenizer.ggml.model": "bert"}}, "model is 'bert', expected gpt2 (byte-level BPE) or llama"),
        ({"pre": None}, "pre is missing, expected the rule by which text is split"),
        ({"pre": "chameleon"}, "pre is 'chameleon', expected a known rule of splitting text: chatglm-bpe, command-r, "),
        ({"absent": ("tokenizer.ggml.tokens",)}, "tokens is missing"),
        ({"absent": ("tokenizer.ggml.merges",)}, "merges is missing"),
        ({"changes": {"tokenizer.ggml.merges": ["a b c"]}}, "merges is a list with 'a b c', expected two tokens"),
        ({"changes": {"tokenizer.ggml.merges": ["zz qq"]}}, "merges is a list with 'zz qq', expected two tokens"),
        ({"changes": {"tokenizer.ggml.token_type": [1, 2]}}, "token_type is an array of 2, expected 340 integers"),
        ({"changes": {"tokenizer.ggml.unknown_token_id": 4000}}, "unknown_token_id is 4000, expected a token's"),
        ({"changes": {"tokenizer.ggml.add_bos_token": 1}}, "add_bos_token is 1, expected true or false"),
        ({"tokens": [*vocabulary()[0], "more"]}, "tokens is a list of 341, expected at most 340, the model's"),
        ({"tokens": [*vocabulary()[0][:-1], "<|im_end|>"]}, "tokens is a list with '<|im_end|>' twice"),
    ],
)  # fmt: skip
def test_unknown_tokenizer_settings_are_refused_by_key(contents, options, message):
    with pytest.raises(InputError) as caught:
        contents(**options)
    assert f"model.gguf: tokenizer.ggml.{message}" in caught.value.message
    assert "\n" not in caught.value.message
