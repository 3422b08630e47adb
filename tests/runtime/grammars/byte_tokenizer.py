"""A byte-level tokenizer that writes any text: a token for each byte, and for a few pieces of JSON."""

from __future__ import annotations

from typing import Any

END = 0
"""The token that ends an answer; it is special."""


def byte_tokenizer(end: str = "<end>") -> Any:
    """Return the tokenizer, as the library of tokenizers has it: 270 tokens or so."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ['{ "', '" :', '" ,', "Ġ {", '" }', "t r", "u e", "tr ue", "n u", "l l", "nu ll", "1 2", "} }"]
    merges = [(first, second) for first, second in (pair.split(" ") for pair in pairs)]
    names = [end, *alphabet, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    tokenizer.add_tokens([AddedToken("<call>", normalized=False)])
    return tokenizer
