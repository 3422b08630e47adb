"""Tokenise a prompt that came as text, unless it is too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

_LONGEST_TOKEN = 1024
"""Characters that one token may stand for on average; longer prompts are refused before they are tokenised."""


class TooLong(InputError):
    """A text that is too long for its tokens to fit a prompt, by its number of characters."""


def token_ids(tokenizer: Tokenizer, text: str, longest: int, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the token ids of a prompt.

    With `add_special_tokens` they begin with the model's start tokens; a chat template writes these itself. Raises
    TooLong if the text cannot possibly fit `longest` tokens; the engine checks the actual number.
    """
    if len(text) > longest * _LONGEST_TOKEN:
        raise TooLong(f"the prompt has {len(text)} characters, expected at most {longest} tokens")
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
