"""Engines whose caches have a format: right ones pass every rung, a wrong code, scale or bound is noticed and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.graph.state import cache_sites
from kvc_trt.operators import cache_formats, vectors
from kvc_trt.operators.attention import recent_attention, selective
from kvc_trt.operators.attention.append import Place
from kvc_trt.operators.shapes import float32
from kvc_trt.reference.model.caching import Tokens, as_stored
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.codes.following import FollowedCodes
from kvc_trt.verify.codes.stored_tokens import StoredTokens
from kvc_trt.verify.engine_run import observe
from kvc_trt.verify.ladder import verify
from kvc_trt.verify.questions.prompts import prompt_lengths, random_prompts
from tests.every_policy import CASES, parameters_of
from tests.stored_tables import FORMATS
from tests.verify.conftest import MODEL

SIZE = MODEL.head_size
STEPS = 3


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rotated(names, first: int):
    """Return each name with one of the formats, in turn."""
    return [(name, FORMATS[(first + number) % len(FORMATS)]) for number, name in enumerate(names)]


def turns_of(parameters) -> bool:
    return parameters.no_turn is None


def assert_passes(engine):
    report = verify(engine, steps=STEPS)
    assert report.passed, report.failures
    assert report.description["kv_cache"] == engine.parameters.kv_cache
    assert f", caches in {engine.parameters.kv_cache}, quick" in report.as_text()
    assert report.halves.cache_format.max_logit_error > 10 * report.halves.engine.max_logit_error
    assert {rung.name for rung in report.rungs if rung.status == "passed"} >= {"ops", "codes", "logits", "tokens"}
    names = {check.name for rung in report.rungs for check in rung.checks}
    assert {"codes unlike their vectors'", "keys and values: error"} <= names
    assert ("turns: codes unlike their vectors'" in names) == (engine.extend_graph is not None)
    assert ("bounds unlike those of codes" in names) == engine.parameters.has_pages


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), rotated(("rocketkv", "h2o", "sparq", "streaming-llm"), 0))
def test_a_right_engine_passes(policy, form, make_engine, parameters_for):
    parameters = parameters_for(policy, kv_cache=form)
    assert_passes(make_engine(parameters, turns=turns_of(parameters)))


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), rotated(CASES, 1))
def test_a_right_engine_of_any_policy_passes(policy, form, make_engine, parameters_for):
    parameters = parameters_for(policy, kv_cache=form)
    assert_passes(make_engine(parameters, turns=turns_of(parameters)))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("policy", CASES)
def test_a_right_engine_of_every_policy_in_every_format_passes(policy, form, weights, make_engine, parameters_for):
    parameters = parameters_for(policy, kv_cache=form)
    assert_passes(make_engine(parameters, weights=weights, turns=turns_of(parameters)))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_drafts_follow_their_own_codes(form, make_engine, parameters_for):
    report = verify(make_engine(parameters_for("full", kv_cache=form), drafts=2), level="logits", steps=7)
    assert report.passed, report.failures
    drafts = [check for rung in report.rungs for check in rung.checks if check.name.startswith("drafts: ")]
    assert [check.name.partition(": ")[2] for check in drafts] == [
        "codes unlike their vectors'", "keys and values: error", "max logit error", "traces of a rejection",
    ]  # fmt: skip


def test_a_head_size_whose_root_is_no_power_of_two_equals_the_dense_twin(make_engine):
    model = replace(MODEL, head_size=32)
    engine = make_engine(parameters_of("rocketkv", model, max_output_len=32, kv_cache="int8"), model=model)
    report = verify(engine, level="codes", steps=STEPS)
    assert report.passed, report.failures


def test_caches_without_a_format_have_no_codes_rung(make_engine, parameters_for):
    engine = make_engine(parameters_for("full"))
    assert "codes" not in [rung.name for rung in verify(engine, steps=2).rungs]
    report = verify(engine, level="codes", steps=2)
    assert report.rungs[0].reason == "the caches hold keys and values as they are computed"
    assert not report.passed


def scale_rounded_down(monkeypatch):
    honest = cache_formats._scale
    monkeypatch.setattr(
        cache_formats, "_scale", lambda emit, exact: honest(emit, emit.Mul(exact, np.float32(1 - 2**-11)))
    )


def code_off_by_one(monkeypatch):
    honest, third = vectors.write_stored, np.eye(SIZE, dtype=np.float32)[3]

    def stored(emit, exact, form):
        codes, *numbers = honest(emit, exact, form)
        if form.code_bits == 4:
            return codes, *numbers
        more = emit.Min(emit.Add(float32(emit, codes), third), np.float32(127))
        return emit.cast(more, np.int8), *numbers

    monkeypatch.setattr(vectors, "write_stored", stored)


def nibbles_swapped(monkeypatch):
    """Writers and readers agree, so that nothing but the bytes themselves is wrong."""
    honest = vectors.write_stored

    def stored(emit, exact, form):
        codes, *numbers = honest(emit, exact, form)
        byte = float32(emit, codes)
        byte = emit.Where(emit.Less(byte, np.float32(0)), emit.Add(byte, np.float32(256)), byte)
        high = emit.Floor(emit.Mul(byte, np.float32(1 / 16)))
        other = emit.Add(emit.Mul(emit.Sub(byte, emit.Mul(high, np.float32(16))), np.float32(16)), high)
        signed = emit.Where(emit.Greater(other, np.float32(127)), emit.Sub(other, np.float32(256)), other)
        return emit.cast(signed, np.int8), *numbers

    def read(emit, packed):
        byte = float32(emit, packed)
        byte = emit.Where(emit.Less(byte, np.float32(0)), emit.Add(byte, np.float32(256)), byte)
        high = emit.Floor(emit.Mul(byte, np.float32(1 / 16)))
        low = emit.Sub(byte, emit.Mul(high, np.float32(16)))
        return emit.Concat(emit.Unsqueeze(high, [-1]), emit.Unsqueeze(low, [-1]), axis=-1)

    monkeypatch.setattr(vectors, "write_stored", stored)
    monkeypatch.setattr(cache_formats, "_nibbles", read)


def stale_scale(monkeypatch):
    """A step writes the codes of its key and leaves the scale of the key that was there."""

    class Stale(Place):
        def store(self, new, layout):
            tables = super().store(new, layout)
            codes, _, *minima = tables.keys.parts
            return replace(tables, keys=replace(tables.keys, parts=(codes, self._emit.Identity("k_scale"), *minima)))

    monkeypatch.setattr(recent_attention, "Place", Stale)


def bounds_of_exact_keys(monkeypatch):
    class Exact(Place):
        def raise_bounds(self, bounds, key, page, layout):
            return super().raise_bounds(bounds, "k_new", page, layout)

    monkeypatch.setattr(selective, "Place", Exact)


MUTANTS = [
    (scale_rounded_down, "rocketkv", "int8", "k_scale of layer 0, row 0, KV head 0, token "),
    (code_off_by_one, "snapkv++", "k8v4", "channel 3: code "),
    (nibbles_swapped, "full", "int4", "k_cache of layer 0, row 0, KV head 0, token 0 in slot 0, channel "),
    (stale_scale, "streaming-llm", "int8", "k_scale of layer 0, row "),
    (bounds_of_exact_keys, "rocketkv", "int4", "bounds of layer 0, row "),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mutate", "policy", "form", "named"), MUTANTS, ids=[one[0].__name__ for one in MUTANTS])
def test_a_mutant_is_noticed_in_its_operators_and_in_the_engine(
    mutate, policy, form, named, make_engine, parameters_for, monkeypatch
):
    with monkeypatch.context() as patched:
        mutate(patched)
        engine = make_engine(parameters_for(policy, kv_cache=form))
    ops = verify(engine, level="ops", steps=STEPS)
    assert any(line.startswith("ops: Kvc") and " caches is " in line for line in ops.failures), ops.failures
    codes = verify(engine, level="codes", steps=STEPS)
    (found,) = (line for line in codes.failures if line.startswith("codes: ") and " unlike " in line)
    assert named in found


def test_wrong_keys_are_far_from_the_references_though_their_codes_are_right(make_engine, parameters_for):
    """Keys and values that change places: each is stored as what it is."""

    def swap(name, model):
        for node in model.graph.node:
            if node.op_type == "KvcDenseAttention":
                node.input[1], node.input[2] = node.input[2], node.input[1]

    report = verify(make_engine(parameters_for("full", kv_cache="int8"), edit=swap), level="codes", steps=STEPS)
    (failure,) = (line for line in report.failures if line.startswith("codes: "))
    assert "keys and values: error" in failure
    assert "(key of layer " in failure


@pytest.mark.parametrize(
    ("tensor", "change", "named"),
    [
        ("v_scale.1", 1.0, "v_scale of layer 1, row 0, KV head 1, token 5 in slot 5, group 0: "),
        ("k_cache.0", 3, "k_cache of layer 0, row 0, KV head 1, token 5 in slot 5, channel 2: code "),
    ],
)
def test_a_part_that_changes_between_steps_is_named(tensor, change, named, make_engine, parameters_for):
    engine = make_engine(parameters_for("full", kv_cache="int8"))
    target = harness_for(engine, RunOptions(threads=1))

    class Damaging(OnnxRuntimeExecutor):
        """An executor whose first step leaves one number changed."""

        def decode(self, *given):
            logits = super().decode(*given)
            if self.runs == 1:
                self.buffers[tensor][0, 1, 5, 0 if tensor.startswith("v_scale") else 2] += change
            return logits

    target._executor = lambda program, expose=(): Damaging(program, RunOptions(threads=1), expose=expose)
    found = observe(engine, target, batch_of(random_prompts(MODEL, [40], 0)), 2).tokens.found
    assert found.wrong == 1
    assert found.first.startswith(named)


class TestFollowedCodes:
    """The reference's caches give back the engine's codes where the engine stored the same token."""

    @pytest.fixture
    def stored(self, make_engine, parameters_for):
        engine = make_engine(parameters_for("full", kv_cache="int4"))
        batch = batch_of(random_prompts(MODEL, prompt_lengths(engine.parameters, 40)[:1], 0))
        return engine, observe(engine, harness_for(engine, RunOptions(threads=1)), batch, 1).tokens

    def test_known_tokens_read_as_the_engines_and_others_as_the_references(self, stored):
        engine, tokens = stored
        (table, _), sites = tokens.tables[0], cache_sites(engine.model, engine.parameters)
        followed = FollowedCodes(sites, tokens.tables)
        heads = MODEL.num_key_value_heads
        exact = torch.from_numpy(table.exact_at(np.tile([0, 1], (1, heads, 1)))).clone()
        given = Tokens(0, 0, engine.parameters, torch.tensor([[0, 10_000]]))
        own, _ = as_stored(given, exact, exact)
        table.parts[0][0, 1, 0, 0] ^= 1  # a code beside an edge
        keys, _ = followed(given, exact, exact)
        differs = (keys != own).nonzero().tolist()
        assert differs == [[0, 1, 0, 0]]
        assert followed.off.vectors == 2 * heads

    def test_the_largest_error_is_kept_with_its_place(self, stored):
        engine, tokens = stored
        followed = FollowedCodes(cache_sites(engine.model, engine.parameters), tokens.tables)
        table, heads = tokens.tables[1][1], MODEL.num_key_value_heads
        exact = torch.from_numpy(table.exact_at(np.zeros((1, heads, 1), np.int64))).clone()
        keys = torch.from_numpy(tokens.tables[1][0].exact_at(np.zeros((1, heads, 1), np.int64)))
        exact[0, 1, 0, 4] += 0.5
        followed(Tokens(1, 0, engine.parameters, torch.tensor([[0]])), keys, exact)
        error, place = followed.off.worst
        assert error == pytest.approx(0.5 / max(1.0, exact.abs().max().item()), rel=1e-5)
        assert place == "value of layer 1, row 0, KV head 1, token 0, channel 4"

    def test_a_nan_is_the_largest_error(self, stored):
        engine, tokens = stored
        followed = FollowedCodes(cache_sites(engine.model, engine.parameters), tokens.tables)
        heads = MODEL.num_key_value_heads
        exact = torch.full((1, heads, 1, SIZE), float("nan"))
        followed(Tokens(0, 0, engine.parameters, torch.tensor([[0]])), exact, exact)
        assert np.isnan(followed.off.worst[0])


def test_an_executor_that_shows_no_blocks_gives_no_stored_tokens(make_engine, parameters_for):
    engine = make_engine(parameters_for("full", kv_cache="int8"))
    target = harness_for(engine, RunOptions(threads=1))
    target.stored_blocks = lambda graph: []
    assert StoredTokens.of(target, cache_sites(engine.model, engine.parameters), "prefill", "decode") is None
