"""Linear layers: a state that takes in tokens one by one, whatever they come with."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import policies
from kvc_trt.errors import InputError
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.cache import ReferenceCache
from kvc_trt.reference.linear import delta_rule
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.oracles.family_models import our_config

LONGEST = 24
ROOM: dict[str, Any] = {"max_input_len": LONGEST, "max_output_len": 8}
few = settings(deadline=None, max_examples=15)


@cache
def decoder(policy: str = "full", **settings: Any) -> ReferenceDecoder:
    """Return a random model of three linear layers to one full, in float64."""
    model = our_config("qwen3.5")
    parameters = policies.resolve(policy, model=model, **{"token_budget": None, **ROOM, **settings})
    weights, method = RandomWeights(model, 3), policies.method(parameters)
    return ReferenceDecoder(model, weights, method=method, parameters=parameters, dtype=torch.float64)


def tokens(count: int) -> torch.Tensor:
    return torch.arange(5, 5 + count)[None] % 61


def states(cache: ReferenceCache, row: int = 0) -> list[torch.Tensor]:
    """Return every state of one row: three layers' memory and last inputs."""
    assert list(cache.linear) == [0, 1, 2]
    return [part[row] for state in cache.linear.values() for part in (state.memory, state.inputs)]


@few
@given(first=st.integers(1, LONGEST - 1), rest=st.data())
def test_a_turn_goes_on_where_the_prompt_ended(first: int, rest: st.DataObject) -> None:
    more = rest.draw(st.integers(1, LONGEST - first))
    text = tokens(first + more)
    whole, at_once = decoder().prefill(text, torch.tensor([first + more]))
    _, apart = decoder().prefill(text[:, :first], torch.tensor([first]))
    logits = decoder().extend(text[:, first:], torch.tensor([more]), apart)
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-9)
    torch.testing.assert_close(states(apart), states(at_once), rtol=0, atol=1e-9)


@few
@given(length=st.integers(2, LONGEST))
def test_a_step_is_a_prompt_with_one_more_token(length: int) -> None:
    text = tokens(length)
    whole, at_once = decoder().prefill(text, torch.tensor([length]))
    _, stepped = decoder().prefill(text[:, :1], torch.tensor([1]))
    for i in range(1, min(length, 8)):
        logits = decoder().decode(text[:, i], stepped)
    if length <= 8:
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-9)
        torch.testing.assert_close(states(stepped), states(at_once), rtol=0, atol=1e-9)


def test_padding_and_neighbours_leave_no_trace() -> None:
    text = torch.cat([tokens(12), tokens(12).flip(1)])
    lengths = torch.tensor([3, 12])
    logits, together = decoder().prefill(text, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone, cache = decoder().prefill(text[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(states(together, row), states(cache), rtol=0, atol=1e-9)


def test_a_policy_acts_on_the_full_layer_alone() -> None:
    text, length = tokens(LONGEST), torch.tensor([LONGEST])
    settings: dict[str, Any] = {"token_budget": 16, "window": 4, "kv_cache": "int8"}
    _, compressed = decoder("rocketkv", **settings).prefill(text, length)
    _, whole = decoder().prefill(text, length)
    assert len(compressed.caches) == len(whole.caches) == 1
    assert compressed.caches[0].lengths.item() < LONGEST
    torch.testing.assert_close(states(compressed), states(whole), rtol=0, atol=0)


def test_a_state_returns_the_value_that_a_key_has_written() -> None:
    """With nothing decayed and all of a correction written, the last value of a key replaces earlier ones."""
    keys = torch.eye(4, dtype=torch.float64)[[0, 1, 0]][:, None]
    values = torch.randn(3, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    memory, nothing = torch.zeros(1, 4, 2, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    read = delta_rule(keys, keys, values, nothing, nothing + 1, memory)
    torch.testing.assert_close(read * 2, values)  # 1/sqrt(4) of it
    torch.testing.assert_close(memory[0, :2], values[[2, 1], 0])


@pytest.mark.parametrize("asked", [{"policy": "pyramidkv"}, {"policy": "snapkv-gqa", "layer_budget": "squeeze-online"}])
def test_a_budget_that_is_divided_among_layers_is_refused(asked: dict[str, str]) -> None:
    with pytest.raises(InputError, match="divides a budget among all layers, and 3 of 4 are linear"):
        policies.resolve(**asked, model=our_config("qwen3.5"), token_budget=160, max_input_len=256, max_output_len=8)
