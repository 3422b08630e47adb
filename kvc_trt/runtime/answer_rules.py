"""The rules of an answer, each described once.

The options of `kvc-trt run`, the keywords of the Python API, and the fields that the servers read follow from `RULES`.
A new rule is one entry here, a field of `Sampling` or `Request` (`request.py`) that holds its value, and the code that
obeys it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.proof.record import PROOF_KINDS
from kvc_trt.runtime.kinds import Kind
from kvc_trt.runtime.logprobs import MOST

_INFINITE = float("inf")


class Client(Enum):
    """Clients that may name a rule in their own way."""

    COMMAND_LINE = "options of kvc-trt run"
    PYTHON = "keywords of Engine.generate, and fields of kvc_trt.Sampling"
    OPENAI = "OpenAI's API, as vLLM and Dynamo extend it"
    TRITON = "vLLM's Triton model, and TensorRT-LLM's `ensemble`"
    TENSORRT_LLM = "TensorRT-LLM's Triton model `tensorrt_llm`"


@dataclass(frozen=True)
class Range:
    """The numbers that a rule allows."""

    lowest: float
    highest: float = _INFINITE
    words: str = ""
    """The range in an error; empty: both ends."""
    excluded: float | None = None
    """An end that is not part of it."""

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.highest and value != self.excluded

    def __str__(self) -> str:
        return self.words or f"from {self.lowest} to {self.highest}"


@dataclass(frozen=True)
class AnswerRule:
    """One rule: its value, and how each client calls it."""

    name: str
    """The field of `Sampling` or `Request` that holds its value."""
    kind: Kind
    default: object
    help: str
    """One line, as `kvc-trt run --help` prints it."""
    range: Range | None = None
    choices: tuple[str, ...] = ()
    """The texts that are allowed; empty: any."""
    names: Mapping[Client, str | None] = field(default_factory=dict)
    """Names that differ from `name`; None for a client that does not have the rule."""
    of_sampling: bool = False
    """True if a field of `Sampling` holds it, and not one of `Request`."""
    of_output: bool = False
    """True if it asks for more to be returned, and changes no token."""
    words: str = ""
    """The name in errors, where it differs from `name`."""
    metavar: str | None = None
    """The placeholder of the value in `kvc-trt run --help`; None: the type."""
    triton_kind: Kind | None = None
    """The type of its field in Triton's models, where it differs."""
    also_default: tuple[object, ...] = ()
    """Values other than the default by which clients of the servers ask for the default."""

    def named(self, client: Client) -> str | None:
        """Return the name by which a client knows the rule; None for a client that does not have it."""
        return self.names.get(client, self.name)

    def plain(self, value: object) -> Any:
        """Return a value of the rule's kind as one plain Python type; InputError, naming the rule, for another.

        None is allowed where it is the default.
        """
        if value is None and self.default is None:
            return None
        name = self.words or self.name
        found = self.kind.plain(value, name)
        if self.choices and found not in self.choices:
            raise InputError(f"{name} is {describe(found)}, expected {' or '.join(self.choices)}")
        return found

    def check(
        self, value: float | None, where: str = "", *, name: str | None = None, at_most: int | None = None
    ) -> None:
        """Raise InputError, opening with `where`, for a value outside of the range.

        None is allowed where it is the default. `name` replaces the rule's own in the error, and `at_most` the upper
        end of its range.
        """
        if self.range is None or (value is None and self.default is None):
            return
        allowed = self.range if at_most is None else replace(self.range, highest=at_most, words="")
        if value is None or value not in allowed:
            raise InputError(f"{where}{name or self.words or self.name} must be {allowed}, found {value}")


_RULES = (
    AnswerRule(
        "max_new_tokens", Kind.INTEGER, None, "The longest answer, in tokens.  [default: max_output_len]",
        Range(1, words="at least 1"),
        names={Client.OPENAI: "max_tokens", Client.TRITON: "max_tokens", Client.TENSORRT_LLM: "request_output_len"},
    ),
    AnswerRule(
        "temperature", Kind.NUMBER, 0.0, "0 always takes the most likely token.",
        Range(0, words="a finite number >= 0", excluded=_INFINITE),
        of_sampling=True,
    ),
    AnswerRule(
        "top_k", Kind.INTEGER, 0, "Draw from the k best tokens; 0: from all.",
        Range(0, words=">= 0 (0 keeps all tokens)"),
        names={Client.TENSORRT_LLM: "runtime_top_k"}, of_sampling=True, words="top-k", also_default=(-1,),
    ),
    AnswerRule(
        "top_p", Kind.NUMBER, 1.0, "Draw from the best tokens that reach this probability.",
        Range(0, 1, words="in (0, 1]", excluded=0),
        names={Client.TENSORRT_LLM: "runtime_top_p"}, of_sampling=True, words="top-p",
    ),
    AnswerRule(
        "min_p", Kind.NUMBER, 0.0, "Draw from tokens with this share of the best probability.",
        Range(0, 1),
        names={Client.TENSORRT_LLM: None}, of_sampling=True, words="min-p",
    ),
    AnswerRule(
        "seed", Kind.LARGE_INTEGER, None, "Equal seeds draw equal answers, alone and in a batch.",
        of_sampling=True,
    ),
    AnswerRule(
        "repetition_penalty", Kind.NUMBER, 1.0, "Above 1: fewer tokens that the prompt or the answer already has.",
        Range(0.01, 100),
        of_sampling=True, words="repetition penalty",
    ),
    AnswerRule(
        "presence_penalty", Kind.NUMBER, 0.0, "Above 0: fewer tokens that the answer already has.",
        Range(-2, 2),
        of_sampling=True, words="presence penalty",
    ),
    AnswerRule(
        "frequency_penalty", Kind.NUMBER, 0.0, "Above 0: fewer tokens that the answer has often, by their count.",
        Range(-2, 2),
        of_sampling=True, words="frequency penalty",
    ),
    AnswerRule(
        "stop_strings", Kind.TEXTS, (), "End the answer before this text; may be repeated.",
        names={
            Client.COMMAND_LINE: "stop", Client.PYTHON: "stop", Client.OPENAI: "stop",
            Client.TRITON: "stop_words", Client.TENSORRT_LLM: "stop_words",
        },
        metavar="TEXT",
    ),
    AnswerRule(
        "stop_token_ids", Kind.TOKENS, (), "End the answer with one of these tokens.",
        names={Client.COMMAND_LINE: None, Client.PYTHON: None, Client.TENSORRT_LLM: None},
    ),
    AnswerRule(
        "bad_words", Kind.TEXTS, (), "Never answer with this text; may be repeated.",
        names={Client.COMMAND_LINE: "bad_word"},
        metavar="TEXT",
    ),
    AnswerRule(
        "min_tokens", Kind.INTEGER, 0, "Do not end the answer before it has this many tokens.",
        Range(0, words="from 0 to the longest answer"),
    ),
    AnswerRule(
        "ignore_eos", Kind.SWITCH, False, "Continue past the model's own end tokens.",
        names={Client.TENSORRT_LLM: None},
    ),
    AnswerRule(
        "grammar", Kind.GRAMMAR, None, "Answer with JSON that follows the schema in this file.",
        names={
            Client.COMMAND_LINE: "json_schema", Client.PYTHON: "schema",
            Client.OPENAI: None, Client.TRITON: None, Client.TENSORRT_LLM: None,
        },
        metavar="FILE",
    ),
    AnswerRule(
        "logit_bias", Kind.BIASES, None, "Bias to add to the logits of these tokens.",
        Range(-100, 100),
        names={
            Client.COMMAND_LINE: None, Client.TRITON: None, Client.TENSORRT_LLM: None,
        },
    ),
    AnswerRule(
        "logprobs", Kind.INTEGER, None,
        f"In --json, the log-probability of each token, and of the N most likely ones (0 to {MOST}).",
        Range(0, MOST),
        names={Client.TRITON: "return_log_probs", Client.TENSORRT_LLM: "return_log_probs"},
        of_output=True, metavar="N", triton_kind=Kind.SWITCH,
    ),
    AnswerRule(
        "kv_proof", Kind.TEXT, None,
        "Prove what the caches kept and read: digests, or also the lists of tokens; in --json, or in the file -o.",
        choices=PROOF_KINDS,
        # Dynamo's frontend knows no such field; its messages carry an annotation instead.
        names={Client.OPENAI: None, Client.TRITON: "return_kv_proof", Client.TENSORRT_LLM: None},
        of_output=True,
    ),
)  # fmt: skip
RULES: Mapping[str, AnswerRule] = MappingProxyType({rule.name: rule for rule in _RULES})
"""Every rule, by its name."""


def rules_of(client: Client) -> dict[str, AnswerRule]:
    """Return the rules that a client has, by its names."""
    return {name: rule for rule in _RULES if (name := rule.named(client)) is not None}
