"""The forms in which models write tool calls, and the choice of a form by a model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.serving.protocol.tools.grammars import AnswerParts, CallGrammar, JsonCalls, NamedCalls, XmlCalls, can_embed
from kvc_trt.tool_calls.named_call import ARGUMENTS, IDENTITY
from kvc_trt.tool_calls.reader import THOUGHTS, CallMarks, Reader, call_id, short_call_id

if TYPE_CHECKING:
    from kvc_trt.runtime.chat.template import ChatTemplate
    from kvc_trt.runtime.grammar.grammar import Grammar
    from kvc_trt.serving.protocol.tools.choice import ToolUse


_NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class ToolFormat:
    """A form of tool calls: the marks by which they are read, and the grammar that forces them."""

    name: str
    """The form's name in `kvc-trt serve --tool-parser`."""
    summary: str
    written_by: tuple[str, ...]
    """Texts that identify the form: a chat template with any of them uses it; empty for the form of all others."""
    marks: CallMarks
    grammar: CallGrammar
    make_id: Callable[[], str] = call_id
    thinks: bool = False
    """True for a model that may write reasoning before its answer."""

    def constrained(
        self, use: ToolUse, prompt: str, given: Grammar | None = None, special: Mapping[str, int] = _NONE
    ) -> Grammar | None:
        """Return the grammar of an answer to this prompt; None if the answer may be any text.

        `special` has the ids of special tokens by their names. `given` is the request's own grammar; if tools are
        offered, the answer may be a call instead. Reasoning may come first if the model writes any. InputError, naming
        the tool, for parameters that are not a JSON schema or use unsupported keywords, and for a grammar that cannot
        be combined with tools.
        """
        if not use.is_forced and given is None:
            return None
        thinks = self._thinks_before(given)
        if not use.offered and not thinks:
            return given
        otherwise = None if use.is_forced else given
        answer = AnswerParts(
            use.callable_tools, use.may_call_several, otherwise, thinks, thinks and self.thinking(prompt)
        )
        return answer.grammar(self.grammar, special)

    def reader(self, use: ToolUse, prompt: str, given: Grammar | None = None) -> Reader:
        """Return the reader of tool calls and reasoning in an answer; the arguments are those of `constrained`."""
        thinks = self._thinks_before(given)
        return Reader(
            self.marks,
            {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in use.callable_tools},
            thinks=thinks,
            thinking=thinks and self.thinking(prompt),
            parallel=use.may_call_several,
            make_id=self.make_id,
        )

    def thinking(self, prompt: str) -> bool:
        """Return whether a prompt ends with the mark that opens reasoning."""
        return self.thinks and prompt.rstrip().endswith(THOUGHTS[0])

    def _thinks_before(self, given: Grammar | None) -> bool:
        return self.thinks and (given is None or can_embed(given))


_FORMATS = (
    ToolFormat(
        "qwen3_coder",
        "`<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`: Qwen3-Coder",
        ("<function=",),
        CallMarks((("<tool_call>", "</tool_call>"),), writing="xml"),
        XmlCalls("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
    ToolFormat(
        "mistral_args",
        "`[TOOL_CALLS]name[ARGS]{...}`: Mistral's newer models",
        (ARGUMENTS,),
        CallMarks((("[TOOL_CALLS]", ""),), writing="named", inside=(ARGUMENTS, IDENTITY)),
        NamedCalls("[TOOL_CALLS]", "[TOOL_CALLS]"),
        short_call_id,
    ),
    ToolFormat(
        "mistral",
        "`[TOOL_CALLS][{\"name\": ..., \"arguments\": {...}}]`",
        ("[TOOL_CALLS]",),
        CallMarks((("[TOOL_CALLS]", ""),), bare=True),
        # The mark is a special token, which a grammar of texts cannot ask for; the list says enough.
        JsonCalls("[", ", ", "]"),
        short_call_id,
    ),
    ToolFormat(
        "llama3_json",
        "`{\"name\": ..., \"parameters\": {...}}`, also after `<|python_tag|>`",
        ("<|python_tag|>", "<|start_header_id|>"),
        CallMarks((("<|python_tag|>", ""),), bare=True),
        JsonCalls(arguments="parameters"),
    ),
    ToolFormat(
        "hermes",
        "`<tool_call>{\"name\": ..., \"arguments\": {...}}</tool_call>`: Hermes, Qwen, SmolLM",
        ("<tool_call>",),
        CallMarks((("<tool_call>", "</tool_call>"),)),
        JsonCalls("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
    ToolFormat(
        "json",
        "`{\"name\": ..., \"arguments\": {...}}`, or a list of such objects: any other model",
        (),
        CallMarks((("```json", "```"),), bare=True),
        JsonCalls(),
    ),
)  # fmt: skip
PARSERS: Mapping[str, ToolFormat] = MappingProxyType({one.name: one for one in _FORMATS})
"""The forms of tool calls by their names in `--tool-parser`."""


def format_of(template: ChatTemplate | None, override: str | None = None) -> ToolFormat:
    """Return the form of a model's calls: the one named by `override`, or the first that its chat template uses.

    InputError for a name that is not in `PARSERS`.
    """
    text = "" if template is None else template.for_tools
    if override is not None and override not in PARSERS:
        raise InputError(
            f"unknown tool parser {describe(override)}{did_you_mean(override, PARSERS)}",
            hint=f"tool parsers: {', '.join(PARSERS)}",
        )
    chosen = next(one for one in _FORMATS if not one.written_by or any(mark in text for mark in one.written_by))
    thinks = template is not None and any(mark in shown for mark in THOUGHTS for shown in (text, template.template))
    return replace(PARSERS[override] if override else chosen, thinks=thinks)
