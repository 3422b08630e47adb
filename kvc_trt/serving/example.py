"""A first request for a newcomer to try: a text or a question that the served model can answer."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from kvc_trt.tasks.kinds.key_value import is_vocabulary

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

QUESTION = "What is the capital of France?"
"""The question for a chat model."""
RECORDS = "<record> lamp scarlet tiger lagos eight <query> lamp"
"""The prompt for a model of the key-value task, which answers with the record's four values."""
BEGINNING = "The capital of France is"
"""The prompt for any other model without a chat template."""


def example_text(tokenizer: Tokenizer) -> str:
    """Return a text that a model with this tokenizer can continue."""
    return RECORDS if is_vocabulary(tokenizer.get_vocab()) else BEGINNING


def curl(address: str, name: str, tokenizer: Tokenizer | None, *, api_key: bool) -> str:
    """Return a curl command that sends a first request to a model behind OpenAI's API.

    `tokenizer` is that of a model that takes completions alone; None for a chat model.
    """
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
    if tokenizer is not None:
        asked = {"prompt": example_text(tokenizer)}
    body = json.dumps({"model": name, **asked, "max_tokens": 32})
    key = ' -H "Authorization: Bearer $KVC_TRT_API_KEY"' if api_key else ""
    path = "chat/completions" if tokenizer is None else "completions"
    return f"curl {address}/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
