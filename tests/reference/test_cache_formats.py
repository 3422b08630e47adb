"""The content of a decoder's caches in 8 and 4 bits, under every policy.

Keys and values of a first layer depend on tokens and positions alone, so an uncompressed run in full precision knows
what each slot of any other run has to hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.registry import method
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference import page_bounds, store
from kvc_trt.reference.cache import LayerCache, ReferenceCache
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.every_policy import CASES, parameters_of
from tests.small_model import SMALL

FORMATS = tuple(name for name in CACHE_FORMATS if name != "auto")
WEIGHTS = RandomWeights(SMALL, 3)
PROMPTS, STEPS, TURN = [200, 61], 3, 20


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(2, 97, (2, 256), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def exact(tokens: Tensor) -> LayerCache:
    """The first layer's cache of every token, in full precision."""
    return list(run(parameters_of("full"), tokens))[-1].caches[0]


def run(parameters: PolicyParameters, tokens: Tensor) -> Iterator[ReferenceCache]:
    """Feed the same tokens under any policy: a prompt, single tokens, a turn if it takes one, single tokens."""
    decoder = ReferenceDecoder(SMALL, WEIGHTS, method=method(parameters), parameters=parameters)
    _, cache = decoder.prefill(tokens[:, : max(PROMPTS)], torch.tensor(PROMPTS))
    yield cache
    for width in (1,) * STEPS + (TURN,) + (1,) * STEPS:
        block = torch.stack([tokens[b, at : at + width] for b, at in enumerate(cache.positions.tolist())])
        if width == 1 or parameters.no_turn is not None:
            for column in block.T:
                decoder.decode(column, cache)
        else:
            decoder.extend(block, torch.tensor([width, width]), cache)
        yield cache


@pytest.mark.parametrize(("name", "format"), [(name, FORMATS[i % len(FORMATS)]) for i, name in enumerate(CASES)])
def test_every_slot_holds_what_store_makes_of_the_exact_vector(name, format, tokens, exact):
    parameters = replace(parameters_of(name, max_output_len=64), kv_cache=format)
    for cache in run(parameters, tokens):
        for group, layer in zip(parameters.groups(0), cache.caches, strict=False):
            kv_heads = range(SMALL.num_key_value_heads) if group.kv_heads is None else group.kv_heads
            for one in [layer] if layer.whole is None else [layer, layer.whole]:
                check(one, exact, list(kv_heads), format, rotated=parameters.positions == "original")
            if layer.page_min is not None:
                rule = group.parameters
                bounds = page_bounds(layer.keys, layer.lengths, rule.page_size, fp8=rule.fp8_bounds)
                assert layer.page_min.equal(bounds[0])
                assert layer.page_max.equal(bounds[1])


def check(found: LayerCache, exact: LayerCache, kv_heads: list[int], format: str, *, rotated: bool) -> None:
    """Compare each slot in use with what its format makes of the vector at its position."""
    stored = CACHE_FORMATS[format]
    per_head = found.keys.shape[1] // len(kv_heads)
    for b, used in enumerate(found.lengths.tolist()):
        for head in range(found.keys.shape[1]):
            places = found.positions[b, head, :used]
            source = b, kv_heads[head // per_head], places
            if rotated:
                assert_stored(found.keys[b, head, :used], exact.keys[source], stored.keys.name)
            assert_stored(found.values[b, head, :used], exact.values[source], stored.values.name)


def assert_stored(found: Tensor, exact: Tensor, format: str) -> None:
    """Equal, but where a prompt's product and a step's round differently beside the edge between two codes."""
    expected = store(exact, format=format).values()
    assert (found != expected).float().mean() < 0.02
    torch.testing.assert_close(found, expected, rtol=0.15 if format == "fp8" else 0, atol=1.1 * step_of(exact, format))


def step_of(exact: Tensor, format: str) -> float:
    """Return the widest distance of two neighbouring codes among these vectors."""
    spread = (exact.amax() - exact.amin()).item()
    return {"int8": spread / 127, "fp8": 0.01 * spread, "int4": spread / 15}[format]


@pytest.mark.parametrize("format", FORMATS)
def test_a_prompt_is_read_exactly_before_it_is_stored(format, tokens):
    """The first logits of a prompt, and what is kept of it, do not depend on the format."""
    plain = parameters_of("rocketkv")
    results = []
    for parameters in (plain, replace(plain, kv_cache=format)):
        decoder = ReferenceDecoder(SMALL, WEIGHTS, method=method(parameters), parameters=parameters)
        results.append(decoder.prefill(tokens[:, : max(PROMPTS)], torch.tensor(PROMPTS)))
    (first, exact_cache), (second, cache) = results
    assert first.equal(second)
    for one, other in zip(exact_cache.caches, cache.caches, strict=True):
        assert one.indices.equal(other.indices)
        assert not one.keys.equal(other.keys)


def test_a_step_reads_its_own_token_as_it_is_stored(tokens, exact):
    parameters = replace(parameters_of("full"), kv_cache="int4")
    decoder = ReferenceDecoder(SMALL, WEIGHTS, method=method(parameters), parameters=parameters)
    _, cache = decoder.prefill(tokens[:, :1], torch.tensor([1, 1]))
    read: list[Tensor] = []

    class Watched:
        compact = method(parameters).compact
        compact_turn = method(parameters).compact_turn

        def select(self, query, layer, rule):
            read.append(layer.values[:, :, 1].clone())
            return method(parameters).select(query, layer, rule)

    decoder.method = Watched()
    decoder.decode(tokens[:, 1], cache)
    assert_stored(read[0], exact.values[:, :, 1], "int4")
    assert not read[0].equal(exact.values[:, :, 1])


@pytest.mark.parametrize("format", FORMATS)
def test_a_turn_reads_its_own_tokens_as_steps_do(format, tokens):
    """A turn and single steps give nearly the same logits; those of full precision are further away."""
    plain = parameters_of("full", max_output_len=64)
    results = {}
    for name, parameters, at_once in (
        ("exact", plain, True),
        ("turn", replace(plain, kv_cache=format), True),
        ("steps", replace(plain, kv_cache=format), False),
    ):
        decoder = ReferenceDecoder(SMALL, WEIGHTS, method=method(parameters), parameters=parameters)
        _, cache = decoder.prefill(tokens[:, :1], torch.tensor([1, 1]))
        if at_once:
            results[name] = decoder.extend(tokens[:, 1:TURN], torch.tensor([TURN - 1, TURN - 1]), cache)
        else:
            results[name] = [decoder.decode(column, cache) for column in tokens[:, 1:TURN].T][-1]
    apart = (results["turn"] - results["steps"]).abs().max()
    assert apart < 0.5 * (results["turn"] - results["exact"]).abs().max()
