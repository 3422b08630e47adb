"""The registry of kinds: they are found by name, and their properties follow from their operators."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvc_trt import reference
from kvc_trt.errors import InputError
from kvc_trt.kernels import reference_ops
from kvc_trt.methods.base import discovery
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection, decode_selection
from kvc_trt.methods.base.isolated_runs import page_bounds
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction, prompt_eviction
from kvc_trt.methods.base.registry import operators, prompt_runs, step_runs, turn_runs
from kvc_trt.operators.turns.replace import REPLACE_BOUNDS, REPLACE_CACHE
from kvc_trt.verify.rungs.turn_operators import shared_runs

PUBLIC_FIELDS = (
    "policy", "prompt_eviction", "decode_selection", "token_budget", "max_input_len", "max_output_len", "capacity",
    "prompt_budget", "window", "pool_kernel", "page_size", "top_r", "top_k", "dense_until", "skip_layers", "split",
    "layer_budgets", "sinks", "recent", "positions", "per_query_head", "reallocate", "retrieval_heads", "squeeze_share",
    "future_positions", "max_conversation_len", "fp8_bounds", "kv_cache", "by_length",
    "long_prompt", "short_pool_kernel", "pool_kind", "prompt_share", "squeeze_cap", "layer_windows",
    "linear_layers",
)  # fmt: skip


def test_the_fields_of_parameters_are_public():
    assert tuple(field.name for field in dataclasses.fields(PolicyParameters)) == PUBLIC_FIELDS
    assert tuple(field.name for field in dataclasses.fields(Constants)) == PUBLIC_FIELDS


def test_an_unknown_kind_is_named():
    with pytest.raises(InputError, match="unknown prompt eviction 'sinks'"):
        prompt_eviction("sinks")
    with pytest.raises(InputError, match="unknown decode selection 'all'"):
        decode_selection("all")


def test_every_kind_of_a_policy_is_found_by_its_name():
    for policy in discovery.objects(Policy).values():
        assert prompt_eviction(policy.eviction.name) is policy.eviction
        assert decode_selection(policy.selection.name) is policy.selection


def test_two_objects_of_one_name_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "another_full.py").write_text(
        "from dataclasses import replace\nfrom kvc_trt.methods.full import FULL as ours\nFULL = replace(ours)\n"
    )
    monkeypatch.setattr(discovery.kvc_trt.methods, "__path__", [*discovery.kvc_trt.methods.__path__, str(tmp_path)])
    with pytest.raises(AssertionError, match="two Policy objects are named 'full'"):
        discovery.objects(Policy)


def test_every_operator_of_a_kind_is_known_and_has_a_run():
    for kind in discovery.objects(DecodeSelection).values():
        assert {one.name for one in kind.operators} <= step_runs().keys() & operators().keys()
    for kind in discovery.objects(PromptEviction).values():
        assert {one.name for one in kind.operators or ()} <= prompt_runs().keys() & operators().keys()


COMPARED_OTHERWISE = {
    "KvcPrefillAttention", "KvcSlidingAttention", "KvcQuantisedLinear", "KvcQuantisedRows", "KvcLayerBudgets",
    "KvcExperts", "KvcQuantisedExperts", "KvcClampedExperts", "KvcQuantisedClampedExperts", "KvcDeltaRule",
    "KvcDeltaStep",
}  # fmt: skip
"""Operators of no single policy: verify runs them as parts of a prompt, and by comparisons of their own."""
OF_A_FORMAT = {"KvcStoreTokens"}
"""Operators of caches that have a format; `tests/operators` and `tests/graph` compare them."""


def test_every_operator_of_a_policy_has_a_run():
    """Covers operators of a step, a prompt or a turn. Only a lowered graph replaces state."""
    lowered = {REPLACE_CACHE.name, REPLACE_BOUNDS.name}
    runs = [set(found) for found in (step_runs(), prompt_runs(), turn_runs(), shared_runs())]
    assert sum(map(len, runs)) == len(set().union(*runs))
    assert set().union(*runs) == operators().keys() - lowered - COMPARED_OTHERWISE - OF_A_FORMAT


def test_every_eviction_says_what_a_turn_does():
    for kind in discovery.objects(PromptEviction).values():
        assert kind.turn
        assert kind.turn.endswith(".")


def test_every_policys_file_says_in_its_docstring_what_a_turn_does():
    files = {path: ast.parse(path.read_text()) for path in Path(discovery.__file__).parent.parent.glob("*.py")}
    calls = {path: [node for node in ast.walk(tree) if isinstance(node, ast.Call)] for path, tree in files.items()}
    of_policies = [path for path, of in calls.items() if any(getattr(one.func, "id", "") == "Policy" for one in of)]
    assert len(of_policies) > 15
    for path in of_policies:
        assert re.search(r"\bturn\b", ast.get_docstring(files[path]) or ""), path.name


def test_step_state_follows_from_its_operator():
    carried = {name: [one.name for one in decode_selection(name).state] for name in ("dense", "hybrid", "sparq")}
    assert carried == {"dense": [], "hybrid": ["bounds"], "sparq": ["channels", "value_sum"]}
    assert [decode_selection(name).pages for name in carried] == [False, True, False]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_page_bounds_are_the_references(page_size, dtype, fp8):
    keys, lengths = np.random.default_rng(0).standard_normal((3, 2, 10, 4)).astype(dtype), np.array([0, 7, 10])
    stored = torch.from_numpy(keys)
    extremes = reference.page_bounds(stored.float(), torch.from_numpy(lengths), page_size, fp8=fp8)
    expected = reference_ops.channel_major(*extremes, stored.dtype, fp8=fp8).numpy()
    np.testing.assert_array_equal(page_bounds(keys, lengths, page_size, fp8=fp8), expected)
