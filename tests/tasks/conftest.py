"""A small tokenizer.json that spells everything, and how to write others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level BPE without merges: 256 tokens, and any text comes back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_tokenizer(*words: str) -> Tokenizer:
    """One token per word and mark; a word that is not listed is `<unk>`."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<unk>", *words))}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture
def byte_file(tmp_path) -> Path:
    """The byte tokenizer as a file."""
    path = tmp_path / "bytes" / "tokenizer.json"
    path.parent.mkdir()
    byte_tokenizer().save(str(path))
    return path
