"""The tokenizer: whole words, halves of keys, and numbers in pairs of digits from the left.

A token carries the space in front of it, so that pieces put together are the text again: ` 1234567` is ` 12`, `34`,
`56`, `7`, and ` brave-otter` is ` brave`, `-otter`.
"""

from __future__ import annotations

import re
from itertools import islice

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from kvc_trt.tasks.haystack import SHORT_SENTENCES
from kvc_trt.tasks.kinds import lines, needles
from kvc_trt.tasks.kinds.key_value import BOS, END, PAD, SPECIALS, UNKNOWN
from kvc_trt.tasks.words import ADJECTIVES, NOUNS, prose

PIECE = r"\n| ?[A-Za-z]+|-[a-z]+| ?[0-9]{1,2}|[^A-Za-z0-9]"
SPECIAL_WORDS = SPECIALS[: UNKNOWN + 1]
PROSE_SENTENCES = 5000  # show every word of the prose


def build_words() -> tuple[str, ...]:
    """All pieces, by id: special ones, digits, keys, then whatever else the tasks are written with."""
    pairs = [f"{number:02}" for number in range(100)]
    digits = [space + text for space in (" ", "") for text in (*map(str, range(10)), *pairs)]
    keys = [f" {word}" for word in ADJECTIVES] + [f"-{word}" for word in NOUNS]
    known = [*SPECIAL_WORDS, *digits, *keys]
    rest = {piece for text in _wording() for piece in re.findall(PIECE, text)}
    return tuple(known) + tuple(sorted(rest - set(known)))


def build_tokenizer() -> Tokenizer:
    """One token per piece; `<bos>` in front of a prompt."""
    words = build_words()
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[UNKNOWN]))
    tokenizer.pre_tokenizer = Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.post_processor = TemplateProcessing(single=f"{words[BOS]} $A", special_tokens=[(words[BOS], BOS)])
    tokenizer.add_special_tokens([AddedToken(words[i], special=True) for i in (PAD, BOS, END, UNKNOWN)])
    return tokenizer


def _wording() -> list[str]:
    """Everything the tasks say, without keys and values."""
    key, number = "", "0"
    four, values = [key] * 4, [number] * 4
    texts = [needles.INTRODUCTION, lines.INTRODUCTION, " Entry", f"\n{lines.line(key, 0)}", *SHORT_SENTENCES]
    texts += [lines.question(key), lines.answer(0), needles.needle(key, number)]
    texts += [f" {time}" for time in needles.TIMES]
    for count in range(1, 5):
        texts += [needles.question([key], count), needles.answer([key], values[:count])]
        texts += [needles.question(four[:count]), needles.answer(four[:count], values[:count])]
    sentences = islice(prose(np.random.default_rng(0)), PROSE_SENTENCES)
    return [piece for text in (*texts, *sentences) for piece in (text, f" {text}")]
