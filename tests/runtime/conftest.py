from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def letters():
    """A tokenizer of single letters: ids 0 to 25 are a to z, 26 is a space, 27 the end token."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {chr(ord("a") + i): i for i in range(26)} | {" ": 26}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer
