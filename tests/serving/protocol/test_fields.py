"""The table of fields has every field that OpenAI's client knows, and says of each what becomes of it."""

from __future__ import annotations

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from kvc_trt.runtime.answer_rules import Client, rules_of
from kvc_trt.serving.protocol.errors import ApiError
from kvc_trt.serving.protocol.fields import FIELDS, BodyField, Endpoint, Fate, given_fields
from tests.serving.protocol import fields_page

OF_OPENAI = {
    Endpoint.CHAT: (chats.CompletionCreateParamsNonStreaming, chats.CompletionCreateParamsStreaming),
    Endpoint.COMPLETIONS: (completions.CompletionCreateParamsNonStreaming, completions.CompletionCreateParamsStreaming),
}
OF_VLLM = {
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words", "add_special_tokens",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "priority", "request_id",
    "logits_processors", "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params",
    "vllm_xargs",
}  # fmt: skip
OF_VLLMS_CHATS = {
    "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
    "mm_processor_kwargs", "include_reasoning",
}  # fmt: skip
EVERY = [(endpoint, field) for endpoint in Endpoint for field in FIELDS[endpoint].values()]


def refusal(body: dict[str, object], endpoint: Endpoint) -> ApiError:
    with pytest.raises(ApiError) as raised:
        given_fields(body, endpoint)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_field_of_the_openai_client_is_listed(endpoint: Endpoint) -> None:
    known = {name for kind in OF_OPENAI[endpoint] for name in kind.__annotations__}
    assert {"model", "temperature", "stop", "n", "stream"} <= known
    assert sorted(known - FIELDS[endpoint].keys()) == []


def test_vllms_common_extras_are_listed() -> None:
    assert sorted(OF_VLLM - FIELDS[Endpoint.COMPLETIONS].keys()) == []
    assert sorted((OF_VLLM | OF_VLLMS_CHATS) - FIELDS[Endpoint.CHAT].keys()) == []


def test_every_rule_of_openais_clients_is_listed() -> None:
    for endpoint in Endpoint:
        assert rules_of(Client.OPENAI).keys() <= FIELDS[endpoint].keys()


@pytest.mark.parametrize(("endpoint", "field"), EVERY, ids=[f"{one.name}-{field.name}" for one, field in EVERY])
def test_a_field_does_what_the_table_says(endpoint: Endpoint, field: BodyField) -> None:
    assert given_fields({field.name: None}, endpoint) == {}
    assert field.words
    something = {"anything": ["at all"]}
    if field.fate is Fate.WORKS:
        assert given_fields({field.name: something}, endpoint) == {field.name: something}
    elif field.fate is Fate.NO_EFFECT:
        assert given_fields({field.name: something}, endpoint) == {}
    else:
        error = refusal({field.name: something}, endpoint)
        assert error.message.startswith(f"{field.name} is not supported, found ")
        assert error.message.endswith(field.words)
        assert error.param == field.name
        for nothing in field.harmless:
            assert given_fields({field.name: nothing}, endpoint) == {}


def test_true_is_not_accepted_for_one() -> None:
    assert given_fields({"best_of": 1}, Endpoint.COMPLETIONS) == {}
    assert refusal({"best_of": True}, Endpoint.COMPLETIONS).param == "best_of"


def test_a_name_that_is_not_listed_is_refused() -> None:
    assert refusal({"max_token": 3}, Endpoint.CHAT).message == "unknown field 'max_token'; did you mean 'max_tokens'?"
    assert refusal({"suffix": "x"}, Endpoint.CHAT).message == (
        "'suffix' is a field of /v1/completions, not of /v1/chat/completions"
    )
    long = refusal({"a" * 10_000: 3}, Endpoint.CHAT)
    assert len(long.message) < 200
    assert long.param is not None
    assert len(long.param) <= 100


def test_the_page_has_the_table() -> None:
    """`python -m tests.serving.protocol.fields_page` writes it."""
    assert fields_page.PAGE.read_text() == fields_page.page()
