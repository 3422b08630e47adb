"""SentencePiece vocabularies in GGUF files, beside SentencePiece's own way of joining and transformers' reading."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, SentencePieceBPETokenizer, Tokenizer

from kvc_trt.errors import InputError
from kvc_trt.models.family import families
from kvc_trt.models.gguf.header import read_header
from kvc_trt.models.gguf.tokenizer import tokenizer_contents
from kvc_trt.models.sources.tensor_file import TensorFile
from kvc_trt.models.sources.tokenizer_library import Tokenizer as Library
from tests.models.gguf.tiny import ALIKE

SPECIAL = ("<unk>", "<s>", "</s>", "<|end|>", "<|user|>")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SENTENCES = (
    ALIKE,
    "the theatre thereof, a banana bandana; aaaaaa aaa",
    "na\u00efve caf\u00e9 \u4e2d\u6587 \U0001f642",
    "x",
)
CLASSES = {"llama": "LlamaForCausalLM", "phi3": "Phi3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}


@cache
def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as SentencePiece writes them: pieces by the order in which they were joined."""
    trained = SentencePieceBPETokenizer(add_prefix_space=True)
    trained.train_from_iterator(
        [*SENTENCES] * 2, vocab_size=240, special_tokens=[AddedToken("<unk>")], show_progress=False
    )
    model = json.loads(trained.to_str())["model"]
    joined = ["".join(merge) for merge in model["merges"]]
    letters = sorted({letter for piece in model["vocab"] if piece != "<unk>" for letter in piece} | {"\u2581"})
    pieces = [piece for piece in dict.fromkeys(joined) if len(piece) > 1] + letters
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "  ", "   ", *pieces]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    types = [UNKNOWN, *[CONTROL] * 4, *[BYTE] * 256, *[USER_DEFINED] * 2, *[NORMAL] * len(pieces)]
    return tokens, scores, types


def joined(text: str, *, prefix: bool) -> list[int]:
    """SentencePiece's ids: of all neighbours that make a piece, those with the highest score are joined first."""
    tokens, scores, types = vocabulary()
    number = {token: at for at, token in enumerate(tokens) if types[at] == NORMAL}
    parts = [*((" " if prefix else "") + text).replace(" ", "\u2581")]
    while True:
        pairs = [(scores[number[a + b]], -at) for at, (a, b) in enumerate(itertools.pairwise(parts))
                 if a + b in number]  # fmt: skip
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    bytes_of = (([number[part]] if part in number else [5 + byte for byte in part.encode()]) for part in parts)
    return [one for ids in bytes_of for one in ids]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def made(architecture: str = "llama", **changes: Any) -> Path:
        tokens, scores, types = vocabulary()
        keys = {
            "model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1,
            "eos_token_id": 2, "unknown_token_id": 0,
        } | changes  # fmt: skip
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        for key, value in keys.items():
            if value is not None:
                adders.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    return made


def contents(path: Path, architecture: str = "llama") -> dict[str, bytes]:
    return tokenizer_contents(read_header(TensorFile(path)), families()[CLASSES[architecture]], 1000)


def tokenizer(path: Path, architecture: str = "llama") -> Tokenizer:
    return Tokenizer.from_str(contents(path, architecture)["tokenizer.json"].decode())


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_joined_as_sentencepiece_joins_them(prefix: bool, file: Callable[..., Path]) -> None:
    found = tokenizer(file(add_space_prefix=prefix))
    texts = [*SENTENCES, *(sentence[at:] for sentence in SENTENCES for at in range(1, len(sentence), 3))]
    assert len({len(joined(text, prefix=prefix)) for text in texts}) > 10
    for text in texts:
        if "  " not in text:  # runs of spaces are tokens of their own
            assert found.encode(text, add_special_tokens=False).ids == joined(text, prefix=prefix), text
            assert found.decode(found.encode(text).ids) == text


@pytest.mark.parametrize("architecture", CLASSES)
def test_ids_are_those_of_transformers(architecture: str, file: Callable[..., Path]) -> None:
    """But for Llama's texts that begin with a space or follow a token taken whole: transformers puts none before them.

    Llama 2's own tokenizer.json does, as llama.cpp does.
    """
    transformers = pytest.importorskip("transformers")
    path = file(architecture, add_space_prefix=architecture != "gemma3")
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = tokenizer(path, architecture)
    texts = [*SENTENCES, "  two spaces", " one", "a<|user|>b", "<s>ab</s>"]
    if architecture == "llama":
        texts = [text for text in SENTENCES if "  " not in text]
    for text in texts:
        assert ours.encode(text).ids == theirs(text).input_ids, text
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids


def test_a_text_begins_as_the_file_says(file: Callable[..., Path]) -> None:
    assert tokenizer(file()).encode("a").ids[0] == 1
    assert tokenizer(file(add_bos_token=False)).encode("a").ids[0] != 1
    assert tokenizer(file(add_eos_token=True)).encode("a").ids[-1] == 2


def test_phi3_takes_away_the_spaces_behind_its_control_tokens(file: Callable[..., Path]) -> None:
    ours = tokenizer(file("phi3"), "phi3")
    assert ours.encode("<|user|>\nab<|end|> \n<|user|>").ids == ours.encode("<|user|>ab<|end|><|user|>").ids
    assert ours.encode("<s> ab").ids != ours.encode("<s>ab").ids
    llama = tokenizer(file())
    assert llama.encode("<|user|>\nab").ids != llama.encode("<|user|>ab").ids


def test_merges_of_the_file_go_before_scores(file: Callable[..., Path]) -> None:
    ours = tokenizer(file(merges=["a n"], scores=None))
    found = ours.encode("banana", add_special_tokens=False).ids
    assert [ours.id_to_token(one) for one in found] == ["\u2581", "b", "an", "an", "a"]


def test_a_vocabulary_of_long_tokens_ends_early(file: Callable[..., Path]) -> None:
    tokens, _scores, _types = vocabulary()
    changed = [*tokens[:-1], "x" * 20_000]
    with pytest.raises(InputError, match=r"tokens is a list of very long texts, expected pieces of words"):
        contents(file(tokens=changed))
    Library(contents(file(tokens=[*tokens[:-1], "x" * 200]))["tokenizer.json"], "file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "model is 't5', expected gpt2 (byte-level BPE) or llama (SentencePiece)"),
        ({"pre": "chatglm-spm"}, "pre is 'chatglm-spm', expected default beside a SentencePiece vocabulary"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is true, expected false: spaces are kept"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is a table, expected none: characters are kept"),
        ({"scores": None}, "scores is missing, expected"),
        ({"scores": [0.0, 1.0]}, "scores is 2 values, expected"),
        ({"scores": [float("nan")] * len(vocabulary()[0])}, "scores is not finite everywhere, expected"),
        ({"scores": [-1.0] * len(vocabulary()[0])}, "scores is one number throughout, expected the order of merges"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1, expected true or false"),
    ],
)
def test_unknown_tokenizer_settings_are_refused_by_key(
    changes: dict[str, Any], message: str, file: Callable[..., Path]
) -> None:
    with pytest.raises(InputError) as caught:
        contents(file(**changes))
    assert f"model.gguf: tokenizer.ggml.{message}" in caught.value.message
    assert "\n" not in caught.value.message
