"""The table of all fields of requests to OpenAI's endpoints, with vLLM's common extras, and the fate of each.

A field works, has no effect on any answer, or is refused with a sentence that gives the alternative. A name that is not
in the table is refused, too. The answer rules come from their own table (`runtime/answer_rules.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from kvc_trt.errors import describe, did_you_mean
from kvc_trt.runtime.answer_rules import AnswerRule, Client, rules_of
from kvc_trt.serving.protocol.errors import NO_FIELD, NOT_SUPPORTED, ApiError, refused


class Endpoint(Enum):
    """An endpoint; its value is its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Fate(Enum):
    """The treatment of a field in a request."""

    WORKS = "works"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


BOTH = frozenset(Endpoint)
CHAT = frozenset({Endpoint.CHAT})
COMPLETIONS = frozenset({Endpoint.COMPLETIONS})


@dataclass(frozen=True)
class BodyField:
    """One field of a request."""

    name: str
    fate: Fate
    words: str
    """The field's effect, the reason that it has none, or the alternative for a client."""
    endpoints: frozenset[Endpoint] = BOTH
    harmless: tuple[object, ...] = ()
    """Values of a refused field that are accepted, because they ask for nothing."""
    rule: AnswerRule | None = None
    """The answer rule that the field sets; None for other fields."""

    def check(self, value: object) -> None:
        """Raise ApiError if the field is refused, unless the value is harmless."""
        if self.fate is Fate.REFUSED and not any(value == one and type(value) is type(one) for one in self.harmless):
            raise refused(
                f"{self.name} is not supported, found {describe(value)}: {self.words}", self.name, code=NOT_SUPPORTED
            )


def _works(name: str, words: str, endpoints: frozenset[Endpoint] = BOTH) -> BodyField:
    return BodyField(name, Fate.WORKS, words, endpoints)


def _no_effect(name: str, words: str, endpoints: frozenset[Endpoint] = BOTH) -> BodyField:
    return BodyField(name, Fate.NO_EFFECT, words, endpoints)


def _refused(name: str, words: str, *harmless: object, endpoints: frozenset[Endpoint] = BOTH) -> BodyField:
    return BodyField(name, Fate.REFUSED, words, endpoints, harmless)


_BY_ENDPOINT = ("logprobs",)
"""Rules whose field has a different type at each endpoint."""
_OF_TEXT = "the model reads and writes text alone"
_OF_TOKENS = "/tokenize returns the tokens of a text"
_OF_GRAMMARS = "response_format, guided_regex, guided_choice or guided_grammar"
_OF_TEMPLATES = "the model's own chat template is used; give chat_template_kwargs what it reads"

_FIELDS = (
    _works("model", "One of the names that `/v1/models` lists."),
    _works("messages", "The conversation; contents are text, or parts of the type text.", CHAT),
    _works("prompt", "Text, token ids, or a list of either.", COMPLETIONS),
    _works("stream", "True sends the answer in chunks, as it is generated."),
    _works("stream_options", "`include_usage`: true adds a last chunk with the usage."),
    _works("n", "Answers to each prompt; answer i has the seed `seed` + i."),
    *(
        BodyField(name, Fate.WORKS, rule.help, rule=rule)
        for name, rule in rules_of(Client.OPENAI).items()
        if name not in _BY_ENDPOINT
    ),
    _works("max_completion_tokens", "OpenAI's newer name of `max_tokens`.", CHAT),
    _works("logprobs", "True returns the log-probability of each token.", CHAT),
    _works("top_logprobs", "The number of most likely tokens to return too, with `logprobs`: true.", CHAT),
    _works("logprobs", "Returns the log-probability of each token, and of this many of the most likely.", COMPLETIONS),
    _works("echo", "True puts the prompt before the answer; not with `logprobs`.", COMPLETIONS),
    _works(
        "response_format", "`json_object`, or `json_schema` with a schema, which the answer follows; `text` is any."
    ),
    _works("structured_outputs", "One of `json`, `json_object`, `regex`, `choice` and `grammar`, as in vLLM."),
    _works("guided_json", "A JSON schema that the answer follows."),
    _works("guided_regex", "A regular expression that matches the whole answer."),
    _works("guided_choice", "A list of texts, of which the answer is one."),
    _works("guided_grammar", "A grammar in Lark's notation that the answer follows."),
    _works("add_generation_prompt", "False does not open the assistant's answer.", CHAT),
    _works("tools", "Functions that the model may call; the prompt describes them (docs/tools.md).", CHAT),
    _works("tool_choice", "`auto`, `none`, `required`, one function, or `allowed_tools`.", CHAT),
    _works("parallel_tool_calls", "False: an answer ends after its first call.", CHAT),
    _works("chat_template_kwargs", "Variables for the model's chat template, such as `enable_thinking`.", CHAT),
    _works(
        "priority",
        "Of requests that wait, the lowest value joins first, as in vLLM; 0 alone behind Dynamo.  [default: 0]",
    ),
    _works("cache_salt", "Prompts share nothing. Refused by an engine with `prefix_bytes`, where they do."),
    _works("return_kv_proof", "`digest` or `lists`: a proof of what the caches kept and read (`serve --kv-proofs`)."),
    _no_effect("user", "Figures and limits are not per user."),
    _no_effect("safety_identifier", "Figures and limits are not per user.", CHAT),
    _no_effect("metadata", "It describes stored answers, and none are stored.", CHAT),
    _no_effect("prompt_cache_key", "It chooses among OpenAI's machines.", CHAT),
    _no_effect("prompt_cache_retention", "It says how long OpenAI keeps a prompt, and none is kept.", CHAT),
    _no_effect("prompt_cache_options", "It says how OpenAI keeps a prompt, and none is kept.", CHAT),
    _no_effect("request_id", "Every answer has an `id` of its own."),
    _refused("store", "no answers are stored; leave it out", False, endpoints=CHAT),
    _refused("service_tier", "there is one tier; leave it out", "auto", "default", endpoints=CHAT),
    _refused("modalities", _OF_TEXT, ["text"], endpoints=CHAT),
    _refused("audio", _OF_TEXT, endpoints=CHAT),
    _refused("prediction", "drafts are made of the conversation itself; leave it out", endpoints=CHAT),
    _refused("web_search_options", "give a tool that searches", endpoints=CHAT),
    _refused("moderation", "nothing is moderated; leave it out", endpoints=CHAT),
    _refused("verbosity", "say in a message how long the answer should be", "medium", endpoints=CHAT),
    _refused("reasoning_effort", "give it in chat_template_kwargs if the model's template reads it", endpoints=CHAT),
    _no_effect("guided_decoding_backend", "There is one."),
    _refused("guided_whitespace_pattern", "the grammar says where white space may be"),
    _refused("structural_tag", f"use {_OF_GRAMMARS}"),
    _refused("functions", "it was replaced by tools", [], endpoints=CHAT),
    _refused("function_call", "it was replaced by tool_choice", "none", endpoints=CHAT),
    _refused("suffix", "write what should follow into the prompt", "", endpoints=COMPLETIONS),
    _refused("best_of", "ask for n answers, and choose", 1, endpoints=COMPLETIONS),
    _refused("use_beam_search", "answers are drawn token by token", False),
    _refused("length_penalty", "it belongs to beam search", 1, 1.0),
    _refused("include_stop_str_in_output", "an answer ends before its stop text; add it yourself", False),
    _refused("skip_special_tokens", "special tokens are no part of a text", True),
    _refused("spaces_between_special_tokens", "special tokens are no part of a text", True),
    _refused("truncate_prompt_tokens", "shorten the prompt yourself; /tokenize counts its tokens"),
    _refused("prompt_logprobs", "log-probabilities are of the answer alone"),
    _refused("allowed_token_ids", f"use {_OF_GRAMMARS}"),
    _refused("add_special_tokens", "give token ids as the prompt", True, endpoints=COMPLETIONS),
    _refused("add_special_tokens", "the chat template writes them", False, endpoints=CHAT),
    _refused("continue_final_message", "end with a user's message", False, endpoints=CHAT),
    _refused("echo", "/v1/completions has it", False, endpoints=CHAT),
    _refused("chat_template", _OF_TEMPLATES, endpoints=CHAT),
    _refused("documents", "write them into a message", [], endpoints=CHAT),
    _refused("mm_processor_kwargs", _OF_TEXT, {}),
    _refused("media_io_kwargs", _OF_TEXT, {}, endpoints=CHAT),
    _refused("prompt_embeds", "give text or token ids as the prompt"),
    _refused("include_reasoning", "reasoning is always returned apart from the content", True, endpoints=CHAT),
    _refused("thinking_token_budget", "max_tokens limits reasoning and content together"),
    _refused("logits_processors", "code from clients is never run", []),
    _refused("return_tokens_as_token_ids", _OF_TOKENS, False),
    _refused("return_token_ids", _OF_TOKENS, False),
    _refused("repetition_detection", "repetition_penalty and frequency_penalty are against repetition"),
    _refused("kv_transfer_params", "kvc-trt serve --role sends caches from process to process"),
    _refused("vllm_xargs", "they are for plugins of vLLM", {}),
    _refused("data_parallel_rank", "there is one process for each engine"),
)


def _of(endpoint: Endpoint) -> Mapping[str, BodyField]:
    return MappingProxyType({field.name: field for field in _FIELDS if endpoint in field.endpoints})


FIELDS: Mapping[Endpoint, Mapping[str, BodyField]] = MappingProxyType({one: _of(one) for one in Endpoint})
"""The fields of each endpoint, by name."""


def given_fields(body: Mapping[str, object], endpoint: Endpoint) -> dict[str, object]:
    """Return the fields of a body that have an effect; a null value counts as not given.

    Raises ApiError, naming the field as the client wrote it, for unknown fields and refused ones.
    """
    known, found = FIELDS[endpoint], {}
    for name, value in body.items():
        field = known.get(name)
        if field is None:
            raise _unknown(name, endpoint)
        if value is None:
            continue
        field.check(value)
        if field.fate is Fate.WORKS:
            found[name] = value
    return found


def _unknown(name: str, endpoint: Endpoint) -> ApiError:
    for other in Endpoint:
        if name in FIELDS[other]:
            return refused(
                f"{describe(name)} is a field of {other.value}, not of {endpoint.value}", name, code=NO_FIELD
            )
    return refused(f"unknown field {describe(name)}{did_you_mean(name, FIELDS[endpoint])}", name, code=NO_FIELD)
