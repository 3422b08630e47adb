"""The facts of a model that requests and answers need, independent of the server and of the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError
from kvc_trt.serving.protocol.logprobs import Spelling
from kvc_trt.serving.protocol.tools import ToolFormat, format_of

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models.sources.tokenizer_library import Tokenizer
    from kvc_trt.runtime.chat.template import ChatTemplate
    from kvc_trt.runtime.executor import Limits


@dataclass(frozen=True)
class ServedModel:
    """One model under the name by which requests ask for it."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """The chat template; None for a model that only takes completions."""
    limits: Limits
    end_token_ids: frozenset[int] = frozenset()
    fingerprint: str = ""
    """The engine's fingerprint."""
    tool_format: ToolFormat = field(default_factory=lambda: format_of(None))
    """The form in which the model writes tool calls."""
    made: int = 0
    """The time at which the model was loaded, in seconds since 1970."""
    spelling: Spelling = field(init=False)
    special_tokens: Mapping[str, int] = field(init=False)
    """The ids of special tokens, which never appear in text, by their names."""

    def __post_init__(self) -> None:
        added = self.tokenizer.get_added_tokens_decoder().items()
        object.__setattr__(self, "spelling", Spelling(self.tokenizer))
        object.__setattr__(self, "special_tokens", {one.content: token for token, one in added if one.special})

    @classmethod
    def of(
        cls, name: str, engine: EngineDirectory, limits: Limits, made: int, *, tool_parser: str | None = None
    ) -> ServedModel:
        """Return the model of an engine; InputError for one without a tokenizer.

        `tool_parser` names the form of its tool calls (`tools.PARSERS`); None takes it from the chat template.
        """
        if engine.tokenizer is None:
            raise InputError(
                f"{engine.path} has no tokenizer, and OpenAI's API is made of text",
                hint="build it from a checkpoint with tokenizer.json; Engine.scheduler in Python answers token ids",
            )
        ends = frozenset(engine.model.eos_token_ids)
        template = None if engine.chat_template is None else engine.chat_template.for_strangers()
        form, fingerprint = format_of(template, tool_parser), f"kvc-{engine.digest[:16]}"
        return cls(name, engine.tokenizer, template, limits, ends, fingerprint, form, made)

    @property
    def context_length(self) -> int:
        """The number of tokens in the longest prompt and an answer for which there is always room, together."""
        return min(self.limits.max_sequence_len, self.limits.max_input_len + self.limits.max_output_len)

    @property
    def document(self) -> dict[str, Any]:
        """The model's entry in the answer of `/v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.made,
            "owned_by": "kvc-trt",
            "max_model_len": self.context_length,
            "max_prompt_len": self.limits.max_input_len,
        }
