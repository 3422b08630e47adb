"""Caches of 8 and 4 bits in PyTorch: every policy stores the reference's codes of its own keys, and reads them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.torch.executor import Decoding, TorchExecutor
from kvc_trt.backends.torch.policy_path import policy_path
from kvc_trt.kernels import use_library
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.runtime import Request, Session, Speculation
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from kvc_trt.verify.ladder import verify
from tests.contexts.test_continuing import session_of, state_of, steps, through_a_file
from tests.every_format import DIFFERENT, in_formats
from tests.every_policy import CASES, CHECKING_DRAFTS, EVERY, TAKING_TURNS, parameters_of
from tests.runtime.test_speculation import Always
from tests.small_model import SMALL
from tests.stored_tables import FORMATS
from tests.verify.conftest import make_engine, parameters_for

__all__ = ["make_engine", "parameters_for"]

STEPS = 3
CHOSEN = ("full", "rocketkv", "snapkv-gqa", "h2o", "sparq", "keydiff")
"""Policies of each way to run: by kernels, by kernels and PyTorch operations, and without a kernel."""


@pytest.fixture
def made(make_engine, parameters_for):
    """made(policy, form): an engine that takes turns and checks drafts where its policy does."""

    def make(policy, form, **options):
        parameters = parameters_for(policy, kv_cache=form)
        turns, drafts = policy in TAKING_TURNS, 2 * (policy in CHECKING_DRAFTS)
        return make_engine(parameters, turns=turns, drafts=drafts, **options)

    return make


def assert_passes(engine, level, **options):
    """Every check, those of codes in prompts, steps, turns and drafts among them."""
    report = verify(engine, RunOptions("torch"), level=level, **options)
    assert report.passed, report.failures
    checks = {check.name for rung in report.rungs for check in rung.checks}
    of = {"drafts: ": engine.draft_graph, "turns: ": engine.extend_graph}
    if level == "quick":
        assert {"codes unlike their vectors'", "keys and values: error"} <= checks
    for name, graph in of.items():
        assert (f"{name}codes unlike their vectors'" in checks) == (graph is not None)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(CASES, 2, CHOSEN))
def test_an_engine_passes_by_the_reference(policy, form, made):
    assert_passes(made(policy, form), "quick", steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(CASES, 0, ("full", "rocketkv")))
def test_an_engine_passes_through_the_emulated_kernels(policy, form, made, emulation):
    assert_passes(made(policy, form), "logits", kernels=emulation.path, steps=STEPS)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_a_16_bit_engine_passes_through_the_emulated_kernels(weights, made, emulation):
    assert_passes(made("rocketkv", "int4", weights=weights), "quick", kernels=emulation.path, steps=STEPS)


def test_a_wrong_code_is_noticed_in_prompts_steps_turns_and_drafts(made, monkeypatch):
    """One bit of the codes of the first head's keys, wherever they are stored."""
    from kvc_trt.kernels import stored_ops

    right = stored_ops.StoredTables.of

    def wrong(keys, values, form):
        tables = right(keys, values, form)
        tables.keys[0][:, 0] ^= 1
        return tables

    monkeypatch.setattr(stored_ops.StoredTables, "of", wrong)
    report = verify(made("rocketkv", "int8"), RunOptions("torch"), steps=STEPS)
    failed = {check.name for rung in report.rungs for check in rung.checks if check.passed is False}
    assert {f"{of}codes unlike their vectors'" for of in ("", "turns: ", "drafts: ")} <= failed
    assert any("k_cache of layer 0, row 0, KV head 0, token " in failure for failure in report.failures)


@pytest.mark.parametrize(("policy", "form"), in_formats(EVERY, 1, ("full", "rocketkv", "rocketkv-mt", "sparq", "h2o")))
def test_a_row_goes_on_from_a_stored_context_bit_for_bit(policy, form, make_program, tmp_path):
    """After a prompt, in an answer and after a turn."""
    program = make_program(policy, turns=True, max_output_len=40, kv_cache=form)
    running, restored = (session_of(program, executor=partial(TorchExecutor, device="cpu")) for _ in range(2))
    generator = np.random.default_rng(3)
    (row,) = running.add([Request(generator.integers(2, 97, 200).tolist(), 16, ignore_eos=True, keep_logits=True)])
    steps(running, 2)
    for _ in range(1 + (program.extend is not None)):
        expected = running.take(row)
        stored = through_a_file(expected, program, tmp_path)
        (again,) = restored.add([Request([], 16, context=stored, ignore_eos=True, keep_logits=True)])
        assert state_of(restored, again) == state_of(running, row)
        assert [seen[again] for seen in steps(restored, 2)] == [seen[row] for seen in steps(running, 2)]
        restored.remove(again)
        if program.extend is not None:
            running.turn(row, generator.integers(2, 97, 7).tolist(), 6)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), in_formats(EVERY, 3, DIFFERENT))
def test_rows_answer_alone_as_in_a_batch(policy, form, make_program):
    executor = TorchExecutor(make_program(policy, max_output_len=40, kv_cache=form), device="cpu")
    generator = np.random.default_rng(7)
    requests = [Request(generator.integers(2, 97, n).tolist(), max_new_tokens=6) for n in (200, 30, 7)]
    together = Session(executor, None, 3).generate(requests)
    for request, expected in zip(requests, together, strict=True):
        assert Session(executor, None, 1).generate([request])[0].token_ids == expected.token_ids


@pytest.mark.parametrize(("policy", "form"), in_formats(CHECKING_DRAFTS, 0, ("rocketkv", "sparq")))
def test_drafts_change_no_answer(policy, form, make_program, monkeypatch):
    monkeypatch.setattr("kvc_trt.runtime.session.drafting.Payoff", Always)
    executor = TorchExecutor(make_program(policy, draft_tokens=3, max_output_len=40, kv_cache=form), device="cpu")
    phrase = np.random.default_rng(5).integers(2, 97, 20).tolist()
    requests = [Request(phrase * 8, max_new_tokens=16, ignore_eos=True), Request(phrase * 2, max_new_tokens=10)]
    expected = Session(executor, None, 2).generate(requests)
    session = Session(executor, None, 2, speculation=Speculation())
    assert [output.token_ids for output in session.generate(requests)] == [output.token_ids for output in expected]
    assert session.timings.draft_runs > 0


@pytest.mark.parametrize("form", FORMATS)
def test_kernels_are_called_in_the_format(form, make_program, emulation, monkeypatch):
    """Covers a prompt, steps and a turn, in caches that evict and in those that keep everything."""
    called, compute = set(), type(emulation).compute

    def noting(self, operator, arguments, **options):
        called.add((operator.name, arguments["cache_format"]))
        return compute(self, operator, arguments, **options)

    monkeypatch.setattr(type(emulation), "compute", noting)
    program = make_program("rocketkv, a skipped layer", turns=True, max_output_len=40, kv_cache=form)
    with use_library(emulation.path):
        executor = TorchExecutor(program)
        found = run(executor, batch_of([list(range(2, 90)), [5, 6, 7]]), 2)
        executor.extend(0, np.full((2, 5), 9), np.array([5, 3]), np.array([90, 5]), found.cache_lengths + 2)
    names = {name for name, code in called if code == program.parameters.cache_format.code}
    prompt, step, turn = {"KvcCompact", "KvcAppendBlock"}, {"Dense", "Hybrid"}, {"KvcJoinBlock", "KvcCompactTurn"}
    assert names == prompt | {f"KvcRotated{kind}Attention" for kind in step} | turn
    assert len(called) == len(names), "an operator was called in another format too"


@pytest.mark.parametrize("policy", EVERY)
def test_a_policy_runs_on_the_same_path_in_every_format(policy):
    paths = {policy_path(SMALL, parameters_of(policy, kv_cache=form)) for form in (AUTO, *FORMATS)}
    assert len(paths) == 1


@pytest.mark.parametrize("policy", ["rocketkv", "keydiff", "sparq"])
def test_exact_keys_and_values_are_shown_of_every_token_of_a_pass(policy, make_engine, parameters_for):
    engine = make_engine(parameters_for(policy, kv_cache="int8"), drafts=2)
    harness = harness_for(engine, RunOptions("torch"))
    passes = harness.stored_blocks("draft")
    assert [len(blocks) for blocks in passes] == [engine.model.num_hidden_layers] * 3
    names = [name for blocks in passes for block in blocks for name in (block.keys, block.values)]
    assert len(set(names)) == len(names)
    executor = harness.open(expose=names)
    executor.allocate(1)
    executor.insert(executor.prefill(np.full((1, 60), 5), np.array([60])), 0, 0)
    executor.check_draft(np.array([[5], [6], [7]]), np.array([60]), np.full((2, 1), 48))
    shown = [executor.exposed(name) for name in names]
    assert all(np.isfinite(one).all() and one.any() for one in shown)
    assert harness.stored_blocks("extend") == []


def test_a_16_bit_engine_rounds_to_16_bits_before_it_stores_codes(make_program):
    """On a CPU it computes in float32; kernels take new tokens in the engine's type."""
    program = make_program("full", "bf16", model=replace(SMALL, dtype="bfloat16"), kv_cache="int8")
    executor = TorchExecutor(program, expose=["key.0", "keys.0"], device="cpu")
    executor.allocate(1)
    executor.insert(executor.prefill(np.full((1, 9), 5), np.array([9])), 0, 0)
    executor.decode(np.array([7]), np.array([9]), np.full((3, 1), 9))
    assert {executor.decoder.exposed[name].dtype for name in ("key.0", "keys.0")} == {torch.bfloat16}


def test_attention_of_others_is_refused_in_a_format(make_program):
    executor = TorchExecutor(
        make_program("full", kv_cache="int8"), decoding=Decoding(dense_attention=print), device="cpu"
    )
    with pytest.raises(ValueError, match="dense_attention reads exact caches; expected kv_cache auto, found int8"):
        executor.load()
