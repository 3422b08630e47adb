"""The tokens of a prompt that came as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

_LONGEST_TOKEN = 1024
"""Characters that one token may stand for on average; longer prompts are refused before they are tokenised."""


class TooLong(InputError):
    """A text that cannot have so few tokens as a prompt may have."""


def token_ids(tokenizer: Tokenizer, text: str, longest: int, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the tokens of a prompt, the model's start tokens included unless the text has them (a chat template's).

    Raises TooLong for a text that cannot have at most `longest` tokens; whether one that can does have so few is the
    engine's to say.
    """
    if len(text) > longest * _LONGEST_TOKEN:
        raise TooLong(f"the prompt has {len(text)} characters, expected at most {longest} tokens")
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
