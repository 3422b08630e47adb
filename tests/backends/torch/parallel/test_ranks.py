"""Several gloo processes give the results of one: logits, tokens, kept and read entries, and state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
from kvc_trt.engine.program import twin_program
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import cache_sites
from kvc_trt.methods.base.isolated_runs import ReadByStep
from kvc_trt.models.config import Attention, Experts, FeedForward, ModelDescription, Norms
from kvc_trt.runtime import Session
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import judge_compaction, run
from kvc_trt.verify.rankings.steps import compare_step
from tests.backends.onnxruntime.test_rows import CLEAR_MARGIN, requests
from tests.backends.prompts import filled, padded, prompts
from tests.backends.torch.parallel.sliding_models import COMMAND_R7B, GEMMA_3
from tests.backends.torch.test_executor import alone
from tests.small_model import SMALL as MODEL

pytestmark = pytest.mark.slow
STEPS = 12
ONE_CODE = 0.02
"""Relative difference allowed between logits: after a sum of ranks, a few keys beside an edge get another code."""
CASES = {
    "a KV head each": (MODEL, 2),
    "two ranks per KV head": (MODEL, 4),
    "one KV head for all, biased and tied": (
        replace(MODEL, num_key_value_heads=1, qkv_bias=True, output_bias=True, tie_word_embeddings=True),
        2,
    ),
    "norms of results, half of a head rotates": (
        replace(MODEL, description=ModelDescription(norms=Norms(place="both"), rotary_channels=8)),
        2,
    ),
    "side by side, plain, scaled, a layer that does not rotate": (
        replace(
            MODEL,
            description=ModelDescription(
                attention=(Attention(), Attention(rotary=False)),
                norms=Norms("layer", bias=True, place="parallel"),
                feed_forward=FeedForward(gated=False, activation="gelu"),
                attention_scale=0.2,
                residual_scale=0.5,
                logit_scale=0.7,
            ),
        ),
        2,
    ),
    "experts, one of all tokens, a dense layer": (
        replace(MODEL, description=ModelDescription(experts=Experts(6, 2, 20, shared_size=12, dense_layers=(1,)))),
        2,
    ),
    "biases between the matrices": (
        replace(
            MODEL, description=ModelDescription(feed_forward=FeedForward(gated=False, bias=True, activation="relu"))
        ),
        2,
    ),
    "a head each, normed": (replace(MODEL, architecture="Qwen3ForCausalLM", qk_norm=True, num_key_value_heads=4), 4),
    "Gemma 3's sliding layers": (GEMMA_3, 2),
    "Command R7B's sliding layers, two ranks per KV head": (COMMAND_R7B, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_give_what_one_process_gives(case, make_program, on_shared_ranks):
    model, ranks = CASES[case]
    program = make_program("rocketkv, a skipped layer", model=model)
    one, several = TorchExecutor(program), on_shared_ranks(program, ranks)
    expected = run(one, batch_of(prompts()), STEPS)
    found = run(several, batch_of(prompts()), STEPS, tokens=expected.tokens)
    assert np.abs(found.logits - expected.logits).max() <= 1e-5 * max(1.0, np.abs(expected.logits).max())
    np.testing.assert_array_equal(found.cache_lengths, expected.cache_lengths)
    assert set(several.buffers) == set(one.buffers)
    for name, buffer in one.buffers.items():
        np.testing.assert_allclose(several.buffers[name], buffer, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(several.buffers["k_cache.0"], one.buffers["k_cache.0"], "before any sum")
    copies = max(1, ranks // model.num_key_value_heads)
    assert several.state_bytes() == copies * one.state_bytes()


@pytest.mark.parametrize(("model", "ranks", "form"), [(MODEL, 2, "int4"), (MODEL, 4, "k8v4"), (GEMMA_3, 2, "int4")])
def test_ranks_store_and_move_the_codes_of_one_process(model, ranks, form, make_program, on_shared_ranks):
    """The parts of a format are divided by KV head; before any sum they are equal to the bit."""
    program = make_program("rocketkv, a skipped layer", model=model, kv_cache=form)
    one, several = TorchExecutor(program), on_shared_ranks(program, ranks)
    expected = run(one, batch_of(prompts()), STEPS)
    found = run(several, batch_of(prompts()), STEPS, tokens=expected.tokens)
    assert np.abs(found.logits - expected.logits).max() <= ONE_CODE * np.abs(expected.logits).max()
    parts = [name for name in one.buffers if name.endswith(".0")]
    assert len(parts) == {"int4": 6, "k8v4": 5}[form]
    for name in parts:
        np.testing.assert_array_equal(several.buffers[name], one.buffers[name], err_msg=name)
    row = several.read_row(0)
    several.write_row(2, row.items())
    for name, part in several.read_row(2).items():
        assert part.tobytes() == row[name].tobytes(), name
    several.fill_rows(row)
    for name, rows in several.buffers.items():
        assert all(part.tobytes() == row[name].tobytes() for part in rows), name


@pytest.mark.parametrize(("model", "ranks"), [(MODEL, 2), (MODEL, 4), (GEMMA_3, 2)])
def test_answers_of_many_rows_are_those_of_one_process(model, ranks, make_program, on_shared_ranks):
    """Seven requests through three rows: rows join, move and leave. Differences count only at a clear best token."""
    program = make_program("rocketkv, a skipped layer", model=model)
    outputs = Session(on_shared_ranks(program, ranks), None, 3).generate(requests())
    close = 0
    for output, request in zip(outputs, requests(), strict=True):
        expected, margins = alone(program, request)
        different = [step for step, pair in enumerate(zip(output.token_ids, expected.token_ids, strict=True)) if
                     pair[0] != pair[1]]  # fmt: skip
        if different:
            assert margins[different[0]] <= CLEAR_MARGIN
            close += 1
    print(f"{close} of {len(outputs)} answers differ where the two best logits are closer than {CLEAR_MARGIN}")
    assert close <= 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_chooses_as_the_reference_on_its_inputs(ranks, make_program, on_shared_ranks):
    """Indices per head on equal inputs, near-ties aside, and in the first layer those of one process."""
    program = make_program("rocketkv, a skipped layer")
    names = [f"{name}.{layer}" for layer in (1, 2) for name in ("q_window", "keys", "values", "indices")]
    names += [f"{name}.{layer}" for layer in (1, 2) for name in ("query", "attended", "selected")]
    group = on_shared_ranks(program, ranks).group
    one, several = TorchExecutor(program, expose=names), ParallelExecutor(program, group, expose=names)
    sites, batch = cache_sites(program.model, program.parameters), batch_of(prompts())
    for executor in (one, several):
        executor.allocate(3)
        step = filled(executor)
        executor.decode(*step)
    for layer in (1, 2):
        got = [several.exposed(f"{name}.{layer}") for name in ("q_window", "keys", "values")]
        compared = judge_compaction(sites[layer], got, several.exposed(f"indices.{layer}"), batch)
        query, attended, selected = (several.exposed(f"{name}.{layer}") for name in ("query", "attended", "selected"))
        keys, values = (several.buffers[f"{kind}_cache.{layer}"][:3] for kind in "kv")
        given = ReadByStep(query, keys, values, step[2][layer] + 1, attended, selected)
        read, error = compare_step(given, sites[layer].parameters, exact=True)
        assert not compared.wrong
        assert not read.wrong
        assert error <= 1e-5
    for name in names:
        assert several.exposed(name).shape == one.exposed(name).shape, name
        if name.startswith(("indices", "selected")):
            assert (several.exposed(name) == one.exposed(name)).mean() >= 0.99, name


def test_layer_budgets_and_other_policies_share_the_ranks(make_program, on_shared_ranks, of_policy):
    program = make_program("full")
    group = on_shared_ranks(program, 2).group
    budgets = of_policy(program, "pyramidkv")
    assert len({tensor.shape for tensor in budgets.state if tensor.name.startswith("k_cache")}) > 1
    for each in (program, budgets, of_policy(program, "hybrid"), twin_program(budgets)):
        expected = run(TorchExecutor(each), batch_of(prompts()), STEPS)
        executor = ParallelExecutor(each, group)
        found = run(executor, batch_of(prompts()), STEPS, tokens=expected.tokens)
        assert np.abs(found.logits - expected.logits).max() <= 1e-5
        np.testing.assert_array_equal(found.cache_lengths, expected.cache_lengths)
        assert {name: buffer.shape[1:] for name, buffer in executor.buffers.items()} == {
            tensor.name: tensor.shape for tensor in each.state
        }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_moves_between_one_process_and_several(ranks, make_program, on_shared_ranks):
    """A stored context holds all KV heads, whatever has run it."""
    program = make_program("rocketkv, a skipped layer")
    one, several = TorchExecutor(program), on_shared_ranks(program, ranks)
    for executor in (one, several):
        executor.allocate(4)
    tokens, positions, lengths = filled(several)
    for row in range(3):
        one.write_row(row, several.read_row(row).items())
    np.testing.assert_allclose(
        several.decode(tokens, positions, lengths), one.decode(tokens, positions, lengths), atol=1e-5
    )
    several.write_row(3, one.read_row(1).items())
    for name, array in one.read_row(1).items():
        np.testing.assert_array_equal(several.read_row(3)[name], array, name)


def test_prefills_and_executors_that_are_dropped_are_dropped_by_the_ranks(make_program, on_ranks):
    program = make_program("full")
    executor = on_ranks(program, 2)
    executor.allocate(2)
    prefilled = executor.prefill(*padded(prompts((5, 3))))
    executor.insert(prefilled, 0, 1)
    number = prefilled.state.number
    del prefilled
    assert executor.group._released == [number]
    executor.move(1, 0)
    assert executor.group._released == []


def test_an_error_before_any_exchange_leaves_the_ranks_as_they_were(make_program, on_shared_ranks):
    executor = on_shared_ranks(make_program("full"), 2)
    executor.load()
    ids = executor.group.process_ids
    with pytest.raises(UnsupportedEnvironment, match=r"of 1000000000 rows need"):
        executor.allocate(10**9)
    executor.allocate(2)
    assert executor.group.process_ids == ids
    assert np.isfinite(executor.prefill(*padded(prompts((5,)))).logits).all()
