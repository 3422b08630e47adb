"""A SentencePiece vocabulary of pairs (`tokenizer.ggml.model` is `llama`) as the sections of a tokenizer.json.

SentencePiece joins, of all neighbours in a text whose joined text is a token, those with the highest score. The
tokenizers library joins by a list of pairs instead; it follows from the scores: the pairs of each token, highest first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

SPACE = "\u2581"
"""The character that stands for a space in a token."""


def merges_of(tokens: Sequence[str], scores: NDArray[Any], joined: Collection[int]) -> list[list[str]]:
    """Return the pairs that make each token of `joined` out of two others of them, in the order of their scores.

    Of equal scores the lower id comes first, and of one token's pairs the one whose first part is the longest.
    """
    parts = {tokens[number] for number in joined}
    merges: list[list[str]] = []
    for number in sorted(joined, key=lambda number: (-float(scores[number]), number)):
        token = tokens[number]
        cuts = range(len(token) - 1, 0, -1)
        merges += [[token[:cut], token[cut:]] for cut in cuts if token[:cut] in parts and token[cut:] in parts]
    return merges


def sections(
    vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], *, unknown: str | None, prefix: bool
) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model; `prefix`: each text begins with a space of its own.

    A character that no token has becomes the tokens of its bytes.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip


def has_an_order(scores: NDArray[Any], joined: Collection[int]) -> bool:
    """Return whether the scores of the joined tokens differ: without that there is no order of merges."""
    found = scores[list(joined)]
    return len(found) < 2 or bool((found != found[0]).any())
