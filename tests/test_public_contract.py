"""The interface for other people's code: `kvc_trt.policies.resolve` and `kvc_trt.reference`, whatever moves inside.

The golden tests of both hold the values; these tests hold import paths, signatures, types, shapes and errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt import policies, reference
from kvc_trt.errors import InputError
from kvc_trt.models.presets import load_preset

SIGNATURES = {
    policies.resolve: "policy, *, model, token_budget, max_input_len, max_output_len, split='adaptive', **overrides",
    reference.append: "keys, values, page_min, page_max, lengths, k_new, v_new, *, page_size, fp8=False",
    reference.compact: "q_window, keys, values, prompt_lengths, *, prompt_budget, pool_kernel, pool_kind='max', "
    "softmax=Softmax(cap=None, sinks=None)",
    reference.dense_attention: "query, keys, values, lengths, *, softmax=Softmax(cap=None, sinks=None)",
    reference.exact_topk: "query, keys, values, lengths, *, top_k, dense_until=0, per_query_head=True",
    reference.heavy_hitter_attention: "query, keys, values, lengths, scores, *, heavy, recent",
    reference.hybrid_attention: "query, keys, values, lengths, page_min, page_max, *, page_size, top_r, top_k, "
    "token_budget=None, dense_until=None, select='tokens', force_recent=0, softmax=Softmax(cap=None, sinks=None)",
    reference.keep_heavy_hitters: "queries, keys, values, prompt_lengths, *, heavy, recent",
    reference.keep_recent: "keys, values, prompt_lengths, *, slots, sinks",
    reference.page_bounds: "keys, lengths, page_size, *, fp8=False",
    reference.quest_attention: "query, keys, values, lengths, page_min, page_max, *, page_size, top_k, "
    "token_budget=0, dense_until=None, softmax=Softmax(cap=None, sinks=None)",
    reference.sparq_attention: "query, keys, values, lengths, *, top_r, top_k, token_budget=0, dense_until=None, "
    "reallocate=True",
    reference.store: "values, *, format",
}
B, H, G, S, D, W, P = 2, 4, 2, 12, 8, 3, 3


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures_have_their_names_and_defaults(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[function]})"


def test_results_have_their_fields() -> None:
    assert reference.Compacted._fields == ("keys", "values", "indices", "lengths", "scores")
    assert reference.Selection._fields == ("output", "selected", "kept", "scores")
    assert reference.Stored._fields == ("codes", "scales", "minima")


def prompt(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_window": (B, H, W, D), "keys": (B, G, S, D), "values": (B, G, S, D)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    return drawn | {"prompt_lengths": torch.tensor([S, 5])}


def step(dtype: torch.dtype) -> dict[str, Tensor]:
    drawn = prompt(dtype)
    page_min, page_max = reference.page_bounds(drawn["keys"], drawn["prompt_lengths"], 4)
    caches = {"keys": drawn["keys"], "values": drawn["values"], "lengths": drawn["prompt_lengths"]}
    return {"query": drawn["q_window"][:, :, 0], **caches, "page_min": page_min, "page_max": page_max}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_have_their_types_and_shapes(dtype: torch.dtype) -> None:
    given, of_step = prompt(dtype), step(dtype)
    before = [tensor.clone() for tensor in (*given.values(), *of_step.values())]
    kept = reference.compact(**given, prompt_budget=6, pool_kernel=3)
    assert [(one.dtype, tuple(one.shape)) for one in kept[:4]] == [
        (dtype, (B, G, 6, D)), (dtype, (B, G, 6, D)), (torch.int32, (B, G, 6)), (torch.int64, (B,)),
    ]  # fmt: skip
    assert kept.indices[1, 0].tolist() == [0, 1, 2, 3, 4, -1]
    for bound in (of_step["page_min"], of_step["page_max"]):
        assert (bound.dtype, tuple(bound.shape)) == (dtype, (B, G, P, D))
    output, selected = reference.hybrid_attention(**of_step, page_size=4, top_r=4, top_k=7)
    assert (output.dtype, tuple(output.shape)) == (dtype, (B, H, D))
    assert (selected.dtype, tuple(selected.shape)) == (torch.int32, (B, G, 7))
    assert selected[1, 0].tolist() == [0, 1, 2, 3, 4, -1, -1]
    after = (*given.values(), *of_step.values())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)), "an input was changed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(B, G, S)}, r"keys.*\[2, 2, 12\].*expected"),
        ({"values": torch.zeros(B, G, S + 1, D)}, r"values.*\[2, 2, 13, 8\].*expected"),
        ({"q_window": torch.zeros(B, 3, W, D)}, r"q_window.*\[2, 3, 3, 8\].*expected"),
        ({"prompt_lengths": torch.tensor([S + 1, 5])}, r"prompt_lengths.*13.*expected|prompt_lengths.*expected.*13"),
        ({"prompt_budget": 2}, r"prompt_budget is 2.*expected"),
        ({"pool_kernel": 4}, r"pool_kernel is 4.*expected"),
        ({"pool_kind": "mean"}, r"pool_kind is 'mean'; expected 'max' or 'avg'"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_bad_argument_is_a_value_error_that_names_it(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.compact(**{**prompt(torch.float32), "prompt_budget": 6, "pool_kernel": 3, **change})


def test_resolve_refuses_in_one_line() -> None:
    lengths = {"model": load_preset("llama3.1-8b").config, "max_input_len": 4096, "max_output_len": 128}
    assert isinstance(policies.resolve("rocketkv", token_budget=256, **lengths), policies.PolicyParameters)
    with pytest.raises(InputError, match=r"unknown policy 'rocketkw'.*rocketkv"):
        policies.resolve("rocketkw", token_budget=256, **lengths)
    with pytest.raises(InputError, match=r"unknown policy override 'page_sizes'.*page_size"):
        policies.resolve("rocketkv", token_budget=256, page_sizes=4, **lengths)
