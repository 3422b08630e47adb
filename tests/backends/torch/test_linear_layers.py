"""Linear layers in PyTorch: the rule beside the reference, rows that stay as they are, slices, memory, verification."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import Engine, build
from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.harness import many_tokens, one_token
from kvc_trt.backends.torch.model import decoder as decoder_module
from kvc_trt.backends.torch.model.linear_layers import LinearInputs, LinearRows, take_token
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.config import Attention, Linear, ModelDescription
from kvc_trt.models.presets import load_preset
from kvc_trt.models.weights import CONVOLUTION, DECAY, DECAY_BIAS
from kvc_trt.operators.linear.delta_rule import CHUNK
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.rungs.parts.linear_layers import LinearCase, linear_case
from tests.backends.torch import meta
from tests.backends.torch.small_blocks import in_blocks
from tests.oracles.family_models import written
from tests.slices import result_of
from tests.small_model import SMALL

PART = Linear(key_heads=2, value_heads=4, key_size=16, value_size=8, kernel=4)
MODEL = replace(
    SMALL,
    num_hidden_layers=4,
    description=ModelDescription(attention=(*[Attention(linear=PART)] * 3, Attention(gated=True))),
)
PUBLISHED = replace(load_preset("qwen3.5-9b").config, num_hidden_layers=4)
BAR = 1e-5


def error(case: LinearCase, *, step: bool = False) -> float:
    run = partial(one_token if step else many_tokens, case.part)
    copies = {name: torch.from_numpy(value.copy()) for name, value in case.inputs.items()}
    return case.error(*(found.numpy() for found in run(**copies)))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=3), st.booleans(), st.integers(0, 100))
def test_chunks_take_in_what_single_tokens_do(lengths: list[int], repeated: bool, seed: int) -> None:
    assert error(linear_case(PART, np.random.default_rng(seed), tuple(lengths), repeated=repeated)) <= BAR


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 3), st.integers(0, 100))
def test_a_step_equals_the_exact_recurrence(rows: int, seed: int) -> None:
    assert error(linear_case(PART, np.random.default_rng(seed), (1,) * rows, step=True), step=True) <= BAR


def test_keys_that_repeat_without_decay_are_solved_exactly() -> None:
    case = linear_case(PART, np.random.default_rng(1), (2 * CHUNK,), repeated=True)
    inputs = {**case.inputs, "decay_bias": np.full(PART.value_heads, -40, np.float32)}
    inputs["write"] = np.full_like(inputs["write"], 20)
    assert error(LinearCase(case.part, inputs, case.lengths)) <= BAR


def test_an_inactive_row_keeps_its_state_whatever_it_is_fed() -> None:
    case = linear_case(PART, np.random.default_rng(2), (1, 1), step=True)
    given = {name: torch.from_numpy(value.copy()) for name, value in case.inputs.items()}
    weights = {CONVOLUTION: given["convolution"], DECAY: given["decay_log"], DECAY_BIAS: given["decay_bias"]}
    given["mixed"][1] = float("nan")
    state = LinearRows(given["last_inputs"], given["memory"])
    before = [part.clone() for part in state]
    inputs = LinearInputs(given["mixed"], given["write"], given["decay"])
    take_token(weights, PART, inputs, state, torch.tensor([True, False]))
    for part, old in zip(state, before, strict=True):
        assert torch.equal(part[1], old[1])
        assert not torch.equal(part[0], old[0])


@pytest.mark.parametrize("policy", ["rocketkv", "tova"])
@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_slices_give_the_bits_of_the_whole_prefill(length: int, policy: str, make_program) -> None:
    program = make_program(policy, model=MODEL)
    executor = TorchExecutor(program, device="cpu", decoding=in_blocks(CHUNK))
    batch = batch_of([np.random.default_rng(length).integers(2, 97, length).tolist()])
    whole = executor.prefill(batch.input_ids, batch.prompt_lengths)
    found, shares = result_of(executor.prefill_in_slices(batch.input_ids, batch.prompt_lengths, limit=0.0))
    assert len(shares) == sum(executor.pieces_of_layers(batch.prompt_lengths))
    np.testing.assert_array_equal(found.logits, whole.logits)
    assert found.state.keys() == whole.state.keys() >= {"memory.0", "last_inputs.0", "k_cache.3"}
    for name, tensor in whole.state.items():
        assert torch.equal(found.state[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "context"), [(1, 32768), (4, 8192), (1, 200)])
@pytest.mark.parametrize("policy", ["full", "rocketkv"])
def test_a_prefill_stays_below_its_bound(policy: str, rows: int, context: int, monkeypatch) -> None:
    monkeypatch.setattr(decoder_module, "prefill_attention", lambda query, keys, values: torch.empty_like(query))
    decoder = meta.decoder(policy, context, PUBLISHED)
    ids = torch.zeros(rows, context - 128, dtype=torch.int64, device=meta.META)
    with meta.LiveBytes() as live:
        decoder.prefill(ids, torch.zeros(rows, dtype=torch.int64, device=meta.META))
    state = state_tensors(PUBLISHED, meta.resolved(policy, context, PUBLISHED), "bfloat16")
    bound = memory.prefill_bytes(PUBLISHED, state, rows, context - 128, itemsize=2)
    assert live.most <= bound <= 1.6 * live.most


def test_a_step_never_waits_for_the_device() -> None:
    decoder = meta.decoder("full", 1024, PUBLISHED)
    buffers = meta.state(meta.resolved("full", 1024, PUBLISHED), 2, PUBLISHED)
    tokens = torch.zeros(2, dtype=torch.int64, device=meta.META)
    with meta.AskingTheDevice():
        logits = decoder.decode(tokens, tokens, tokens[None].clone(), buffers)
    assert logits.shape == (2, PUBLISHED.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["rocketkv", "tova"])
def test_engines_with_linear_layers_pass_verification(policy: str, weights: str, tmp_path: Path) -> None:
    """Full layers by kernels' reference, and by nodes; verification compares the rule, turns and whole answers."""
    pytest.importorskip("transformers")
    written("qwen3.5", tmp_path / "checkpoint", **({} if weights == "fp32" else {"dtype": "bfloat16"}))
    engine = tmp_path / "engine"
    room = {"token_budget": 64, "max_input_len": 256, "max_output_len": 32, "weights": weights, "verify": False}
    build(str(tmp_path / "checkpoint"), output=engine, policy=policy, backend="torch", **room)
    with Engine.open(engine, threads=1) as opened:
        report = opened.verify(level="quick", steps=4, samples=2)
    assert report.passed, report.failures
    checks = [check.name for rung in report.rungs for check in rung.checks]
    assert {"KvcDeltaRule values", "KvcDeltaStep values"} <= set(checks)
    assert any(name.startswith("turns") for name in checks)
