"""Tokenizers at which the library panics: small files that differ from a good one in a field or two."""

from __future__ import annotations

import copy
import json
from typing import Any

_GOOD: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 3,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "unk_token": None, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def tokenizer_file(**changes: object) -> bytes:
    """Return a tokenizer.json of the letters a and b, and of `<s>`; `changes` are fields with other content."""
    return json.dumps({**copy.deepcopy(_GOOD), **changes}).encode()


def _with_prefix(prefix: str, vocabulary: dict[str, int]) -> bytes:
    model = {**_GOOD["model"], "continuing_subword_prefix": prefix, "vocab": vocabulary}
    return tokenizer_file(model=model)


PANICS = {
    "at loading: a prefix that is longer than a token": _with_prefix("##", {"a": 0, "b": 1}),
    "at encoding: the template's special token is missing": tokenizer_file(
        post_processor={**_GOOD["post_processor"], "special_tokens": {}}
    ),
    "at decoding: more is stripped than there is": tokenizer_file(
        decoder={
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 2**64 - 1}],
        }
    ),
}
"""Name -> content of a tokenizer.json at which the library panics."""
