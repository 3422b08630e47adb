"""The table of a request's fields: name and type of each.

The names are those of TensorRT-LLM's and vLLM's Triton models. The fields of rules come from the table of answer rules
(`runtime/answer_rules.py`), a server's inputs follow from this one, and `request.py` reads requests by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvc_trt.runtime.answer_rules import RULES, AnswerRule, Client, rules_of
from kvc_trt.runtime.kinds import Kind


@dataclass(frozen=True)
class Field:
    """One field of a request."""

    name: str
    kind: Kind
    of_sampling: bool = False
    """True if `sampling_parameters` may hold the field, too."""
    only: float | None = None
    """The only accepted value, which changes nothing but which clients send; None accepts any value."""


def _of_rule(name: str, rule: AnswerRule) -> Field:
    return Field(name, rule.triton_kind or rule.kind, of_sampling=not rule.of_output)


_FIELDS = (
    Field("text_input", Kind.TEXT),
    Field("input_ids", Kind.TOKENS),
    Field("stream", Kind.SWITCH),
    Field("sampling_parameters", Kind.TEXT),
    *(_of_rule(name, rule) for name, rule in rules_of(Client.TRITON).items()),
    Field("beam_width", Kind.INTEGER, of_sampling=True, only=1),
    Field("length_penalty", Kind.NUMBER, of_sampling=True, only=1),
    Field("exclude_input_in_output", Kind.SWITCH),
    Field("return_finish_reason", Kind.SWITCH),
    Field("return_num_input_tokens", Kind.SWITCH),
    Field("return_num_output_tokens", Kind.SWITCH),
    Field("return_output_ids", Kind.SWITCH),
    Field("return_kv_cache_tokens", Kind.SWITCH),
)
FIELDS: Mapping[str, Field] = MappingProxyType({field.name: field for field in _FIELDS})
"""The fields of a request, by name."""
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        theirs: ours
        for rule in RULES.values()
        if not rule.of_output and (ours := rule.named(Client.TRITON)) and (theirs := rule.named(Client.OPENAI))
        if theirs != ours
    }
)
"""vLLM's names of fields in `sampling_parameters` -> our names, where the two differ."""

_ONLY_OF_SAMPLING = (
    Field("n", Kind.INTEGER, only=1),
    Field("best_of", Kind.INTEGER, only=1),
    *(Field(theirs, FIELDS[ours].kind) for theirs, ours in OTHER_NAMES.items()),
)
SAMPLING_FIELDS: Mapping[str, Field] = MappingProxyType(
    {field.name: field for field in (*(field for field in _FIELDS if field.of_sampling), *_ONLY_OF_SAMPLING)}
)
"""The fields of the JSON object `sampling_parameters`."""
