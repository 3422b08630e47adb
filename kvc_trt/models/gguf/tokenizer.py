"""A GGUF file's tokenizer as the files that a Hugging Face directory has, from the metadata.

Two kinds are read: byte-level BPE, and SentencePiece's vocabularies of pairs. Nothing is guessed: a vocabulary of
another kind, or one split by a rule that is not known here, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.family import Family
from kvc_trt.models.gguf.architecture import end_tokens
from kvc_trt.models.gguf.header import GgufHeader
from kvc_trt.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from kvc_trt.models.gguf.sentencepiece import has_an_order, merges_of, sections
from kvc_trt.models.sources.tokenizer import check_size
from kvc_trt.models.sources.tokenizer_library import Tokenizer

_PREFIX = "tokenizer.ggml."
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
          "pad_token": "padding_token_id"}  # fmt: skip
"""Name in tokenizer_config.json -> key of the metadata."""
_TEMPLATE = "tokenizer.chat_template"
_MOST_CUTS = 1 << 28
"""Characters of all parts into which tokens are cut; Gemma's 262,000 tokens have 15 million."""
_ANOTHER_WAY = "build from the model's Hugging Face directory, which has its tokenizer.json"


def tokenizer_contents(header: GgufHeader, family: Family, vocab_size: int) -> dict[str, bytes]:
    """Content by file name; InputError where the metadata is missing, inconsistent or not understood."""
    return _TokenizerMetadata(header, family, vocab_size).contents()


class _TokenizerMetadata:
    """The keys of one file, checked when read."""

    def __init__(self, header: GgufHeader, family: Family, vocab_size: int) -> None:
        self._header, self._family, self._vocab_size = header, family, vocab_size
        kind = self._scalar("model", str)
        known = f"{_BYTE_LEVEL} (byte-level BPE) or {_SENTENCEPIECE} (SentencePiece)"
        if kind is None:
            raise self._wrong("model", "missing", f"{known}: the file has no tokenizer", hint=_ANOTHER_WAY)
        if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
            raise self._wrong("model", describe(kind), known, hint=_ANOTHER_WAY)
        self._split = self._pre_tokenizer() if kind == _BYTE_LEVEL else None
        self._tokens = self._texts("tokens")
        if len(self._tokens) > vocab_size:
            found = f"a list of {len(self._tokens)}"
            raise self._wrong("tokens", found, f"at most {vocab_size}, the model's vocabulary")
        self._vocabulary = {token: number for number, token in enumerate(self._tokens)}
        if len(self._vocabulary) != len(self._tokens):
            twice = next(token for number, token in enumerate(self._tokens) if self._vocabulary[token] != number)
            raise self._wrong("tokens", f"a list with {describe(twice)} twice", "each token once")
        self._named = {name: self._token(key) for name, key in _NAMED.items()}
        self._types = self._token_types()

    def contents(self) -> dict[str, bytes]:
        """Content by file name."""
        files = {
            "tokenizer.json": _json(self._tokenizer()),
            "tokenizer_config.json": _json(self._tokenizer_config()),
            "generation_config.json": _json(self._generation_config()),
        }
        template = self._header.scalar(_TEMPLATE)
        if template is not None and not isinstance(template, str):
            raise InputError(f"{self._header.source}: {_TEMPLATE} is {describe(template)}, expected text")
        if template:
            files["chat_template.jinja"] = template.encode()
        for name, content in files.items():
            check_size(name, len(content), f"{self._header.source}: {name} of its metadata")
        Tokenizer(files["tokenizer.json"], f"{self._header.source}: what {_PREFIX}* describes")
        return files

    def _tokenizer(self) -> dict[str, Any]:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **(self._sentencepiece() if self._split is None else self._byte_level(self._split)),
            "post_processor": self._post_processor(),
        }

    def _added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that are taken out of a text as they are, before it is split."""
        special = (_CONTROL,) if self._split is not None else (_CONTROL, _UNKNOWN)
        gguf = self._family.gguf
        kept = None if gguf is None or self._split is not None else gguf.keeps_spaces
        return [
            {
                "id": number, "content": self._tokens[number], "single_word": False, "lstrip": False,
                "rstrip": kept is not None and self._types[number] in special and self._tokens[number] not in kept,
                "normalized": False, "special": bool(self._types[number] in special),
            }
            for number in np.flatnonzero(np.isin(self._types, (*special, _USER_DEFINED))).tolist()
        ]  # fmt: skip

    def _byte_level(self, split: PreTokenizer) -> dict[str, Any]:
        return {
            "normalizer": {"type": "NFC"} if split.normalised else None,
            "pre_tokenizer": split.steps(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                "ignore_merges": split.whole_pieces_first, "vocab": self._vocabulary, "merges": self._merges(),
            },
        }  # fmt: skip

    def _sentencepiece(self) -> dict[str, Any]:
        pre = self._scalar("pre", str)
        if pre not in (None, "default"):
            raise self._wrong("pre", describe(pre), "default beside a SentencePiece vocabulary", hint=_ANOTHER_WAY)
        if self._scalar("remove_extra_whitespaces", bool):
            raise self._wrong("remove_extra_whitespaces", "true", "false: spaces are kept", hint=_ANOTHER_WAY)
        if self._header.metadata.get(_PREFIX + "precompiled_charsmap") is not None:
            raise self._wrong("precompiled_charsmap", "a table", "none: characters are kept", hint=_ANOTHER_WAY)
        prefix, unknown = self._scalar("add_space_prefix", bool), self._named["unk_token"]
        if _PREFIX + "merges" in self._header.metadata:
            merges = self._merges()
        else:
            normal = np.flatnonzero(self._types == _NORMAL).tolist()
            if sum(len(token) ** 2 for token in self._tokens) > _MOST_CUTS:
                raise self._wrong("tokens", "a list of very long texts", "pieces of words")
            merges = merges_of(self._tokens, self._scores(normal), normal)
        named = None if unknown is None else self._tokens[unknown]
        return sections(self._vocabulary, merges, unknown=named, prefix=prefix is not False)

    def _tokenizer_config(self) -> dict[str, Any]:
        named = {name: self._tokens[number] for name, number in self._named.items() if number is not None}
        begins, ends = self._added()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": begins,
            "add_eos_token": ends,
            **named,
        }

    def _generation_config(self) -> dict[str, Any]:
        ids = {"bos_token_id": self._named["bos_token"], "pad_token_id": self._named["pad_token"]}
        given = {name: number for name, number in ids.items() if number is not None}
        ends = end_tokens(self._header, self._vocab_size)
        return given | ({"eos_token_id": ends} if ends else {})

    def _post_processor(self) -> dict[str, Any] | None:
        """The post-processor that adds `bos` and `eos` to a text; None if the file asks for neither."""
        added = [
            self._named[name] for name, adds in zip(("bos_token", "eos_token"), self._added(), strict=True) if adds
        ]
        if not added:
            return None
        texts = [self._tokens[number] for number in added if number is not None]
        ends = self._added()[1]
        before, after = (texts[:-1], texts[-1:]) if ends else (texts, [])

        def surrounded(sequence: str, kind: int) -> list[dict[str, Any]]:
            around = [[{"SpecialToken": {"id": text, "type_id": kind}} for text in part] for part in (before, after)]
            return [*around[0], {"Sequence": {"id": sequence, "type_id": kind}}, *around[1]]

        return {
            "type": "TemplateProcessing",
            "single": surrounded("A", 0),
            "pair": [*surrounded("A", 0), *surrounded("B", 1)],
            "special_tokens": {text: {"id": text, "ids": [self._vocabulary[text]], "tokens": [text]} for text in texts},
        }

    def _added(self) -> tuple[bool, bool]:
        """Return whether a text starts with `bos` and ends with `eos`; only tokens that the file names are added."""
        begins, ends = self._scalar("add_bos_token", bool), self._scalar("add_eos_token", bool)
        if begins is None:
            begins = True if self._split is None else self._split.begins
        return begins and self._named["bos_token"] is not None, bool(ends) and self._named["eos_token"] is not None

    def _merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self._texts("merges")]
        for merge in merges:
            if len(merge) != 2 or "".join(merge) not in self._vocabulary or not set(merge) <= self._vocabulary.keys():
                expected = "two tokens with a space between them, which make a token together"
                raise self._wrong("merges", f"a list with {describe(' '.join(merge))}", expected)
        return merges

    def _scores(self, normal: Sequence[int]) -> NDArray[Any]:
        """Return the score of each token, those of `normal` finite and not all the same."""
        scores, count = self._header.metadata.get(f"{_PREFIX}scores"), len(self._tokens)
        expected = f"{count} numbers, one for each token"
        if not isinstance(scores, np.ndarray) or scores.shape != (count,) or scores.dtype.kind != "f":
            found = "missing" if scores is None else f"{len(scores) if hasattr(scores, '__len__') else scores} values"
            raise self._wrong("scores", found, expected, hint=_ANOTHER_WAY)
        if not np.isfinite(scores[list(normal)]).all():
            raise self._wrong("scores", "not finite everywhere", expected)
        if not has_an_order(scores, normal):
            raise self._wrong("scores", "one number throughout", "the order of merges", hint=_ANOTHER_WAY)
        return scores

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._scalar("pre", str)
        if name is None:
            raise self._wrong("pre", "missing", "the rule by which text is split before merging", hint=_ANOTHER_WAY)
        if name not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise self._wrong("pre", describe(name), f"a known rule of splitting text: {known}", hint=_ANOTHER_WAY)
        return PRE_TOKENIZERS[name]

    def _token_types(self) -> NDArray[Any]:
        """The kind of each token; where the file does not say, the tokens that it names are control tokens."""
        types = self._header.metadata.get(f"{_PREFIX}token_type")
        if types is None:
            types = np.full(len(self._tokens), _NORMAL, np.int32)
            types[[number for number in self._named.values() if number is not None]] = _CONTROL
            return types
        if not isinstance(types, np.ndarray) or types.shape != (len(self._tokens),) or types.dtype.kind not in "iu":
            found = f"an array of {len(types)}" if isinstance(types, np.ndarray) else describe(types)
            raise self._wrong("token_type", found, f"{len(self._tokens)} integers, one for each token")
        return types

    def _token(self, key: str) -> int | None:
        number: int | None = self._scalar(key, int)
        if number is not None and not 0 <= number < len(self._tokens):
            raise self._wrong(key, str(number), f"a token's number, below {len(self._tokens)}")
        return number

    def _texts(self, key: str) -> Sequence[str]:
        texts = self._header.metadata.get(_PREFIX + key)
        if not isinstance(texts, list) or (key == "tokens" and not texts):
            found = "missing" if texts is None else f"a {type(texts).__name__}"
            raise self._wrong(key, found, "a list of texts")
        return texts

    def _scalar(self, key: str, kind: type) -> Any:
        value = self._header.scalar(_PREFIX + key)
        if value is not None and type(value) is not kind:
            raise self._wrong(key, describe(value), {str: "text", bool: "true or false", int: "an integer"}[kind])
        return value

    def _wrong(self, key: str, found: str, expected: str, *, hint: str | None = None) -> InputError:
        return InputError(f"{self._header.source}: {_PREFIX}{key} is {found}, expected {expected}", hint=hint)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
