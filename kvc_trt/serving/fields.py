"""The names under which a request says what it wants, and the type of each.

They are those of TensorRT-LLM's and vLLM's Triton models. A server's inputs follow from this table, and `request.py`
reads requests by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Kind(Enum):
    """The type of a field's value, as an error names it."""

    TEXT = "a text"
    TEXTS = "texts"
    TOKENS = "a list of token ids"
    INTEGER = "an integer"
    LARGE_INTEGER = "an integer from 0 to 2^64 - 1"
    NUMBER = "a number"
    SWITCH = "true or false"


@dataclass(frozen=True)
class Field:
    """One name that a request may have."""

    name: str
    kind: Kind
    of_sampling: bool = False
    """True if `sampling_parameters` may say it too."""
    only: float | None = None
    """The one value that is accepted, which asks for nothing: clients send it whether they need it or not."""


_FIELDS = (
    Field("text_input", Kind.TEXT),
    Field("input_ids", Kind.TOKENS),
    Field("max_tokens", Kind.INTEGER, of_sampling=True),
    Field("stream", Kind.SWITCH),
    Field("sampling_parameters", Kind.TEXT),
    Field("temperature", Kind.NUMBER, of_sampling=True),
    Field("top_k", Kind.INTEGER, of_sampling=True),
    Field("top_p", Kind.NUMBER, of_sampling=True),
    Field("seed", Kind.LARGE_INTEGER, of_sampling=True),
    Field("min_p", Kind.NUMBER, of_sampling=True),
    Field("repetition_penalty", Kind.NUMBER, of_sampling=True),
    Field("presence_penalty", Kind.NUMBER, of_sampling=True),
    Field("frequency_penalty", Kind.NUMBER, of_sampling=True),
    Field("min_tokens", Kind.INTEGER, of_sampling=True),
    Field("stop_words", Kind.TEXTS, of_sampling=True),
    Field("bad_words", Kind.TEXTS, of_sampling=True),
    Field("stop_token_ids", Kind.TOKENS, of_sampling=True),
    Field("ignore_eos", Kind.SWITCH, of_sampling=True),
    Field("beam_width", Kind.INTEGER, of_sampling=True, only=1),
    Field("length_penalty", Kind.NUMBER, of_sampling=True, only=1),
    Field("exclude_input_in_output", Kind.SWITCH),
    Field("return_finish_reason", Kind.SWITCH),
    Field("return_num_input_tokens", Kind.SWITCH),
    Field("return_num_output_tokens", Kind.SWITCH),
    Field("return_log_probs", Kind.SWITCH),
    Field("return_output_ids", Kind.SWITCH),
    Field("return_kv_cache_tokens", Kind.SWITCH),
    Field("return_kv_proof", Kind.TEXT),
)
FIELDS: Mapping[str, Field] = MappingProxyType({field.name: field for field in _FIELDS})
"""What a request may have, by name."""

_ONLY_OF_SAMPLING = (
    Field("n", Kind.INTEGER, only=1),
    Field("best_of", Kind.INTEGER, only=1),
    Field("stop", Kind.TEXTS),
)
SAMPLING_FIELDS: Mapping[str, Field] = MappingProxyType(
    {field.name: field for field in (*(field for field in _FIELDS if field.of_sampling), *_ONLY_OF_SAMPLING)}
)
"""What the JSON object `sampling_parameters` may have, by vLLM's names, of which some differ (`OTHER_NAMES`)."""
OTHER_NAMES: Mapping[str, str] = MappingProxyType({"stop": "stop_words"})
