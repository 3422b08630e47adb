"""Dataclasses, typed keywords and pages of docs spell out the answer rules; all agree with the table of rules."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import get_type_hints

import click
import pytest

from kvc_trt.api.rules import AnswerRules, requests_of
from kvc_trt.cli.commands.run import command
from kvc_trt.errors import InputError
from kvc_trt.proof import ProofKind
from kvc_trt.runtime import Context, Grammar, Request, Sampling
from kvc_trt.runtime.answer_rules import RULES, AnswerRule, Client, rules_of
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.kinds import Kind
from kvc_trt.runtime.request import request_under
from kvc_trt.serving.dynamo.requests import request_of
from kvc_trt.serving.fields import FIELDS, OTHER_NAMES
from kvc_trt.serving.request import parse_request
from kvc_trt.serving.triton.family.model_names import ENGINE_INPUTS, ENSEMBLE_INPUTS
from kvc_trt.serving.triton.tensors import MANY, TensorType, type_of

DOCS = Path(__file__).parent.parent / "docs"
NOT_RULES = {
    "prompt_token_ids", "context", "context_token_ids", "continuation_token_ids",  # the text
    "keep_logits", "keep_context", "stay", "kv_proof_prompt",  # what becomes of the row
    "banned_token_ids",  # the same rule as bad_words, by tokens
    "sampling",
}  # fmt: skip
TYPES = {Kind.INTEGER: int, Kind.LARGE_INTEGER: int, Kind.NUMBER: float, Kind.SWITCH: bool}
VALUES = {
    "max_new_tokens": 5, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4,
    "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop_strings": ("a",),
    "stop_token_ids": (7, 8), "bad_words": ("b",), "min_tokens": 2, "ignore_eos": True, "logprobs": 0,
    "kv_proof": "lists", "grammar": Grammar.choice(["a"]), "logit_bias": {3: 1.5},
}  # fmt: skip
ALL = request_under((), VALUES)


def of(client: Client) -> Request:
    """Return a request under the values of all rules that a client has."""
    return request_under((), {rule.name: VALUES[rule.name] for rule in rules_of(client).values()})


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_field_holds_each_rule(rule: AnswerRule) -> None:
    owner = Sampling if rule.of_sampling else Request
    (field,) = [one for one in fields(owner) if one.name == rule.name]
    assert field.default == rule.default
    types = {"context": Context, "kv_proof": ProofKind}
    if rule.kind in TYPES:
        expected = TYPES[rule.kind] if rule.default is not None else TYPES[rule.kind] | None
        assert get_type_hints(owner, localns=types)[rule.name] == expected


def test_the_dataclasses_have_no_rules_outside_the_table() -> None:
    assert {field.name for field in fields(Sampling)} == {rule.name for rule in RULES.values() if rule.of_sampling}
    of_request = {rule.name for rule in RULES.values() if not rule.of_sampling}
    assert {field.name for field in fields(Request)} == of_request | NOT_RULES
    assert all(field.default is not MISSING for field in fields(Sampling))


def test_the_typed_keywords_are_those_of_the_table() -> None:
    others = {"ProofKind": ProofKind, "Sampling": Sampling, "Schema": object}
    types = get_type_hints(AnswerRules, localns=others)
    assert set(types) == {*rules_of(Client.PYTHON), "sampling"}
    for name, rule in rules_of(Client.PYTHON).items():
        if rule.kind in TYPES:
            expected = TYPES[rule.kind]
            assert types[name] == (expected if rule.default is not None else expected | None)


def test_keywords_reach_the_request() -> None:
    given = {name: VALUES[rule.name] for name, rule in rules_of(Client.PYTHON).items()}
    [request] = requests_of([()], given)
    assert request == of(Client.PYTHON)
    given = {name: value for name, value in given.items() if not hasattr(Sampling, name)}
    assert requests_of([()], {"sampling": ALL.sampling, **given}) == [request]
    assert requests_of([[1]], {"sampling": None, "stop": "a"}) == [Request([1], stop_strings=("a",))]


def test_the_command_has_an_option_for_each_rule() -> None:
    options = {flag: option for option in command.params for flag in option.opts if flag.startswith("--")}
    for name, rule in rules_of(Client.COMMAND_LINE).items():
        option = options[f"--{name.replace('_', '-')}"]
        assert isinstance(option, click.Option)
        assert (option.name, option.help) == (rule.name, rule.help)
        assert rule.named(Client.PYTHON) is not None


def test_fields_of_triton_reach_the_request() -> None:
    returned = {"return_log_probs": True, "return_kv_proof": "lists"}
    given = {name: VALUES[rule.name] for name, rule in rules_of(Client.TRITON).items()} | returned
    assert parse_request({"text_input": "x", **given}).rules == of(Client.TRITON)
    assert set(OTHER_NAMES) <= set(rules_of(Client.OPENAI))


def test_fields_of_dynamo_reach_the_request() -> None:
    groups: dict[str, dict[str, object]] = {"sampling_options": {}, "stop_conditions": {}, "output_options": {}}
    for name, rule in rules_of(Client.OPENAI).items():
        of_group = "output_options" if rule.of_output else "stop_conditions"
        groups["sampling_options" if rule.of_sampling else of_group][name] = VALUES[rule.name]
    limits = Limits(
        vocab_size=50, max_input_len=32, max_output_len=8, max_sequence_len=40, capacities=(40,), prompt_block=1
    )
    found = request_of({"token_ids": [3], **groups}, limits)
    # The frontend looks for stop strings itself, and knows no proofs.
    assert found == replace(of(Client.OPENAI), prompt_token_ids=[3], stop_strings=(), kv_proof=None)


def test_tritons_ensemble_and_engine_have_the_rules_of_the_table() -> None:
    for rule in RULES.values():
        ensemble, engine = rule.named(Client.TRITON), rule.named(Client.TENSORRT_LLM)
        if engine is not None:
            assert ensemble in ENSEMBLE_INPUTS
        assert engine is None or engine in ENGINE_INPUTS


def test_a_number_outside_of_its_range_is_refused() -> None:
    for rule in RULES.values():
        if rule.range is None:
            continue
        assert rule.default is None or rule.default in rule.range
        if rule.default is None:
            rule.check(None)
        else:
            with pytest.raises(InputError, match=r"^here: .* found None$"):
                rule.check(None, "here: ")
        for value in (rule.range.lowest - 1, rule.range.highest * 2 + 1, float("nan"), rule.range.excluded):
            if value is not None and value not in rule.range:
                with pytest.raises(InputError, match=f"^here: .* must be {re.escape(str(rule.range))}, found "):
                    rule.check(value, "here: ")


def shown(value: object) -> str:
    return "-" if value in (None, ()) else f"`{value}`"


def row(rule: AnswerRule) -> str:
    names = [rule.named(client) for client in Client]
    names[0] = names[0] and f"--{names[0].replace('_', '-')}"
    default = str(rule.default).lower() if rule.kind is Kind.SWITCH else rule.default
    values = " or ".join(f"`{one}`" for one in rule.choices) or (str(rule.range) if rule.range else rule.kind.value)
    return " | ".join([*(shown(name) for name in names), shown(default), values])


def test_the_page_lists_them() -> None:
    page = (DOCS / "answer-rules.md").read_text()
    rows = [line.strip("| ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert rows == [row(rule) for rule in RULES.values()]


def written(one: TensorType) -> str:
    return f"{one.data_type} list" if one.dims == (MANY,) else one.data_type


def test_the_page_of_servers_has_every_field_and_its_type() -> None:
    section = (DOCS / "serving-triton.md").read_text().split("\n## Requests\n")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, types, _ = line.strip("| ").split(" | ", 2)
            of_names = re.findall(r"`(\w+)`", names)
            of_types = types.split(", ")
            found |= dict(zip(of_names, of_types * (len(of_names) if len(of_types) == 1 else 1), strict=True))
    assert found == {name: written(type_of(field)) for name, field in FIELDS.items()}


@pytest.mark.parametrize(
    ("page", "section", "client"),
    [
        ("openai-fields.md", "Works", Client.OPENAI),
        ("serving-triton.md", "For clients of TensorRT-LLM", Client.TENSORRT_LLM),
    ],
)
def test_the_page_of_servers_names_every_rule(page: str, section: str, client: Client) -> None:
    text = (DOCS / page).read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    spelled = Client.TRITON if client is Client.TENSORRT_LLM else client
    names = {rule.named(spelled) for rule in rules_of(client).values()}
    assert sorted(name for name in names if f"`{name}`" not in text) == []
