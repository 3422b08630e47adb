"""Splits of text before byte-level BPE, by the name in `tokenizer.ggml.pre`.

A name stands for the tokenizer of one family of models, so an entry has all in which that tokenizer differs from
others: a model read from GGUF gets the ids of the same model's tokenizer.json. That is more than other readers of the
format take from the name: transformers splits `smollm` as GPT-2, leaves Qwen2's text unnormalised and always merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """The steps of a family's tokenizer before and after the merges."""

    pattern: str | None = None
    """The regular expression of one piece; None for GPT-2's own, which the tokenizers library has built in."""
    single_digits: bool = False
    """True if every digit is a piece of its own, before anything else is split."""
    punctuation_apart: bool = False
    """True if runs of punctuation are pieces of their own before anything else is split, and digits in threes after."""
    normalised: bool = False
    """True if text is brought into Unicode's composed form (NFC) first."""
    whole_pieces_first: bool = False
    """True if a piece that is a token is taken as it is, even where merges would not make it."""
    begins: bool = False
    """True if a text begins with the `bos` token where the file does not say."""

    def steps(self) -> dict[str, Any]:
        """The `pre_tokenizer` section of a tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.punctuation_apart:
            steps.append({"type": "Punctuation", "behavior": "Contiguous"})
        if self.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            pattern = {"Regex": self.pattern}
            steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        use_regex = self.pattern is None
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex})
        if self.punctuation_apart:
            threes = {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}
            steps += [{"type": "Digits", "individual_digits": False}, threes]
        return {"type": "Sequence", "pretokenizers": steps}


_LLAMA3_FAMILY = PreTokenizer(_LLAMA3, whole_pieces_first=True, begins=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "chatglm-bpe": PreTokenizer(_LLAMA3),
    "command-r": PreTokenizer(single_digits=True, normalised=True),
    "dbrx": PreTokenizer(_LLAMA3),
    "default": PreTokenizer(),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "falcon": PreTokenizer(punctuation_apart=True),
    "glm4": PreTokenizer(_LLAMA3),
    "gpt-2": PreTokenizer(),
    "gpt-4o": PreTokenizer(_GPT4O),
    "llama-bpe": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "olmo": PreTokenizer(normalised=True),
    "qwen2": PreTokenizer(_QWEN2, normalised=True),
    "qwen35": PreTokenizer(_QWEN35, normalised=True),
    "refact": PreTokenizer(single_digits=True),
    "smaug-bpe": PreTokenizer(_LLAMA3, whole_pieces_first=True),
    "smollm": PreTokenizer(single_digits=True),
    "starcoder": PreTokenizer(single_digits=True),
    "tekken": PreTokenizer(_TEKKEN, whole_pieces_first=True, begins=True),
}
