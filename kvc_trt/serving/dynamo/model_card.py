"""Model cards: the facts of a model that the gateway needs, in a file that workers write beside Dynamo's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.files.atomic import write_whole
from kvc_trt.files.inputs import read_json_input
from kvc_trt.models.sources.tokenizer import read_tokenizer
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.executor import Limits
from kvc_trt.serving.protocol.model import ServedModel
from kvc_trt.serving.protocol.tools import format_of
from kvc_trt.validation import OwnSchema, validated

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

CARD = "kvc_trt.json"
_LARGEST = 4 << 20


class _Template(OwnSchema):
    template: str
    for_tools: str | None
    special_tokens: dict[str, str]


class _Limits(OwnSchema):
    """The limits of an engine that requests are checked against."""

    vocab_size: int
    max_input_len: int
    max_output_len: int
    max_sequence_len: int

    def plain(self) -> Limits:
        """Return them as an engine's limits, without the facts of its caches."""
        return Limits(**self.model_dump(), capacities=(), prompt_block=1)


class _Card(OwnSchema):
    fingerprint: str
    made: int
    limits: _Limits
    end_token_ids: list[int]
    template: _Template | None
    tool_parser: str


def model_of(engine: EngineDirectory, name: str, tool_parser: str | None = None) -> ServedModel:
    """Return the model of an engine that is served as `name`; `tool_parser` and errors as for `ServedModel.of`."""
    parameters = engine.parameters
    limits = _Limits(
        vocab_size=engine.model.vocab_size,
        max_input_len=parameters.max_input_len,
        max_output_len=parameters.max_output_len,
        max_sequence_len=parameters.max_sequence_len,
    )
    return ServedModel.of(name, engine, limits.plain(), int(time.time()), tool_parser=tool_parser)


def write_card(model: ServedModel, directory: Path) -> None:
    """Write a model's card into the directory from which the frontend reads the model, beside its tokenizer.json."""
    limits = {name: getattr(model.limits, name) for name in _Limits.model_fields}
    card = _Card(
        fingerprint=model.fingerprint,
        made=model.made,
        limits=_Limits(**limits),
        end_token_ids=sorted(model.end_token_ids),
        template=None if model.template is None else _written(model.template),
        tool_parser=model.tool_format.name,
    )
    write_whole(directory / CARD, card.model_dump_json().encode())


def read_card(directory: Path) -> ServedModel:
    """Return the model of the card in a directory; the directory's name is the model's. InputError for a bad card."""
    card = validated(_Card, read_json_input(directory / CARD, _LARGEST), str(directory / CARD))
    template = None
    if card.template is not None:
        tokens, for_tools = card.template.special_tokens, card.template.for_tools
        template = ChatTemplate(card.template.template, special_tokens=tokens, for_tools=for_tools)
    return ServedModel(
        directory.name,
        read_tokenizer(directory / "tokenizer.json"),
        template,
        card.limits.plain(),
        frozenset(card.end_token_ids),
        card.fingerprint,
        format_of(template, card.tool_parser),
        card.made,
    )


def _written(template: ChatTemplate) -> _Template:
    text, for_tools = template.template, template.for_tools
    return _Template(
        template=text, for_tools=None if for_tools == text else for_tools, special_tokens=template.special_tokens
    )
