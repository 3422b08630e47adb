"""A model as requests and their answers see it, whatever serves it."""

from __future__ import annotations

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
    """None for a model that takes completions alone."""
    limits: Limits
    end_token_ids: frozenset[int] = frozenset()
    fingerprint: str = ""
    """What tells this engine from all others."""
    tool_format: ToolFormat = field(default_factory=lambda: format_of(None))
    """How it writes calls of tools."""
    made: int = 0
    """Seconds since 1970."""
    spelling: Spelling = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spelling", Spelling(self.tokenizer))

    @classmethod
    def of(
        cls, name: str, engine: EngineDirectory, limits: Limits, made: int, *, tool_parser: str | None = None
    ) -> ServedModel:
        """Return the model of an engine; InputError for one without a tokenizer.

        `tool_parser` is the form of its calls (`tools.PARSERS`); None is what its chat template says.
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
        """Tokens of the longest prompt and an answer for which there is always room, together."""
        return min(self.limits.max_sequence_len, self.limits.max_input_len + self.limits.max_output_len)

    @property
    def document(self) -> dict[str, Any]:
        """The model as `/v1/models` describes it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.made,
            "owned_by": "kvc-trt",
            "max_model_len": self.context_length,
            "max_prompt_len": self.limits.max_input_len,
        }
