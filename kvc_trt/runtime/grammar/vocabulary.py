"""The bytes of text that each token of a model stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError, describe

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Vocabulary:
    """The tokens of a model with `size` logits: `tokens` has the bytes of each id, empty for an id without a token.

    InputError, naming the tokenizer's decoder, if the bytes of a token depend on the tokens beside it.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        written = _writer(json.loads(tokenizer.to_str()).get("decoder"))
        added = tokenizer.get_added_tokens_decoder()
        self.tokens = [b""] * size
        self.special: list[int] = []
        """Ids of tokens that write nothing, such as the model's end tokens; `tokens` has their names."""
        for text, token in tokenizer.get_vocab().items():
            if token < size:
                self.tokens[token] = text.encode() if token in added else written(text)
        for token, one in added.items():
            if one.special and token < size:
                self.special.append(token)

    def encode(self, text: str) -> list[int]:
        """Return the tokenizer's tokens for a text that continues another; special tokens are not among them."""
        expected, special = text.encode(), set(self.special)
        for before in ("", "\n"):  # some tokenizers put a space in front of the first word
            ids = self._encoded(before + text)
            for start in range(len(ids)):
                rest = ids[start:]
                if b"".join(self.tokens[token] for token in rest) == expected and special.isdisjoint(rest):
                    return rest
        return self._longest(expected)

    def _encoded(self, text: str) -> list[int]:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except InputError:  # a user's tokenizer may fail at this text
            return []
        return [token for token in ids if token < len(self.tokens)]

    def _longest(self, text: bytes) -> list[int]:
        """Return tokens of a text, each as long as possible, up to the first place where no token matches."""
        ids: list[int] = []
        while text:
            length = next((n for n in range(min(len(text), self._most_bytes), 0, -1) if text[:n] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[text[:length]])
            text = text[length:]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special)
        return {one: token for token, one in enumerate(self.tokens) if token not in special}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self._ids))

    def missing(self, characters: str) -> str:
        """Return those of these ASCII characters that have no token of their own."""
        return "".join(one for one in characters if one.encode() not in self._ids)


def _writer(decoder: Any) -> Callable[[str], bytes]:
    """Return the function that turns a token's text in the vocabulary into its bytes."""
    kinds = [one.get("type") for one in _steps(decoder)]
    if kinds == ["ByteLevel"]:
        return _of_byte_level
    if kinds == ["Fuse"]:
        return str.encode
    if kinds == ["Metaspace"] or (
        "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    ):
        return _of_sentence_piece
    found = "no decoder" if not kinds else f"the decoder {describe(' + '.join(map(str, kinds)))}"
    raise InputError(
        f"grammars need a tokenizer whose tokens are pieces of the text, and tokenizer.json has {found}",
        hint="take a model with a byte-level or a SentencePiece tokenizer, as nearly all chat models have",
    )


def _steps(decoder: Any) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") == "Sequence":
        return [one for one in decoder.get("decoders", ()) if isinstance(one, Mapping)]
    return [decoder]


def _of_sentence_piece(text: str) -> bytes:
    match = _BYTE.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(_SPACE, " ").encode()


def _of_byte_level(text: str) -> bytes:
    known = _bytes_of_characters()
    if all(one in known for one in text):
        return bytes(known[one] for one in text)
    return text.encode()  # as the library does


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    A byte that Latin-1 prints is written as its own character; the others are written in order from U+0100 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
