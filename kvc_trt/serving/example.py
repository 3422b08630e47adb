"""A first question for a newcomer: a text or a question that the served model can answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.tasks.key_value import is_vocabulary

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

QUESTION = "What is the capital of France?"
"""For a model that chats."""
RECORDS = "<record> lamp scarlet tiger lagos eight <query> lamp"
"""For a model of the key-value task, which answers with the record's four values."""
BEGINNING = "The capital of France is"
"""For any other model of words."""


def example_text(tokenizer: Tokenizer) -> str:
    """Return a text that a model with this tokenizer can go on with."""
    return RECORDS if is_vocabulary(tokenizer.get_vocab()) else BEGINNING
