"""The draft graph: as many decode steps in one pass, with the same choices, against steps and the reference decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.graph.build import build_draft
from kvc_trt.graph.rewrites.expose import expose, index_lists
from kvc_trt.graph.weights import EngineWeights, GraphWeights
from kvc_trt.methods.base.registry import method
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.graph.small_models import SmallEngine, make_small_engine, open_session, prompts_of
from tests.rounding import assert_close

POLICIES = (
    "full", "hybrid", "quest", "quest-matched", "sparq", "rocketkv", "rocketkv-mt", "snapkv++", "snapkv-gqa", "snapkv",
    "pyramidkv", "keydiff", "expected-attention", "expected-attention-hybrid",
)  # fmt: skip
EVICTING_STEPS = ("streaming-llm", "sliding-window", "h2o", "tova", "duo-attention")
TOKENS = 4


class DraftEngine:
    """A small engine, and its draft graph with every index list exposed."""

    def __init__(self, directory, policy: str, precision: str = "fp32", tokens: int = TOKENS, **changes) -> None:
        self.engine = make_small_engine(directory, policy, precision, **{**room_of(policy), **changes})
        weights = GraphWeights(directory / "weights.safetensors")
        self.tokens = tokens
        self.model = build_draft(self.engine.model, self.engine.parameters, weights=weights, tokens=tokens)
        self.lists = index_lists(self.model)
        self._session = open_session(expose(self.model, self.lists), directory)

    def check(self, tokens: np.ndarray, positions, cache_lengths, state) -> dict[str, np.ndarray]:
        feeds = {tensor.name: state[tensor.name] for tensor in self.engine.state}
        names = [output.name for output in self._session.get_outputs()]
        places = {"token": tokens, "positions": positions, "cache_lengths": cache_lengths}
        return dict(zip(names, self._session.run(names, {**places, **feeds}), strict=True))


def room_of(policy: str) -> dict[str, int]:
    budget = {"snapkv": 96, "pyramidkv": 64, "duo-attention": 160}.get(policy, 48)
    more = {"window": 8, "pool_kernel": 7} if policy == "rocketkv-mt" else {}
    return {"max_input_len": 250, "max_output_len": 24, "token_budget": budget, **more}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    made: dict[tuple, DraftEngine] = {}

    def draft(policy: str, precision: str = "fp32", **changes) -> DraftEngine:
        key = (policy, precision, *sorted(changes.items()))
        if key not in made:
            made[key] = DraftEngine(tmp_path_factory.mktemp("draft"), policy, precision, **changes)
        return made[key]

    return draft


def compare(draft: DraftEngine, prompts: list[np.ndarray], tokens: np.ndarray, steps_before: int = 0) -> None:
    """A pass and its tokens as steps: equal choices, equal state after each token, logits equal to rounding."""
    engine: SmallEngine = draft.engine
    result = engine.prefill(prompts)
    positions, lengths = np.array([len(prompt) for prompt in prompts]), result["cache_lengths"]
    for token in range(steps_before):
        result = engine.decode(np.full(len(prompts), 5 + token), positions, lengths, result)
        positions, lengths = positions + 1, lengths + 1
    found = draft.check(tokens, positions, lengths, result)
    for number, of_rows in enumerate(tokens):
        result = engine.decode(of_rows, positions + number, lengths + number, result)
        assert_close(found["logits"][number], result["logits"])
        for tensor in engine.state:
            after = found[tensor.outputs(len(tokens))[number]]
            assert_close(after, result[tensor.name], name=tensor.name)
        end = "" if number == len(tokens) - 1 else f".token{number}"
        for name in (name for name in result if name.startswith("selected.")):
            np.testing.assert_array_equal(found[name + end], result[name], err_msg=name)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pass_is_its_tokens_steps_with_the_same_choices(drafts, policy):
    tokens = np.random.default_rng(1).integers(2, 97, (TOKENS, 2))
    compare(drafts(policy), prompts_of(240, 37), tokens)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 250), min_size=1, max_size=3),
    steps_before=st.integers(0, 7),
    policy=st.sampled_from(["rocketkv", "hybrid", "quest", "sparq"]),
    seed=st.integers(0, 99),
)
def test_drafts_equal_steps_for_random_rows_and_places_in_a_page(drafts, lengths, steps_before, policy, seed):
    tokens = np.random.default_rng(seed).integers(2, 97, (TOKENS, len(lengths)))
    compare(drafts(policy), prompts_of(*lengths, seed=seed), tokens, steps_before)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_fp16_and_int8_passes_stay_near_steps(drafts, precision):
    draft = drafts("rocketkv", precision)
    tokens = np.random.default_rng(3).integers(2, 97, (TOKENS, 2))
    engine, prompts = draft.engine, prompts_of(240, 37)
    result = engine.prefill(prompts)
    positions, lengths = np.array([240, 37]), result["cache_lengths"]
    found = draft.check(tokens, positions, lengths, result)
    for number, of_rows in enumerate(tokens):
        result = engine.decode(of_rows, positions + number, lengths + number, result)
        np.testing.assert_allclose(found["logits"][number], result["logits"], atol=2e-2, rtol=0)


def test_drafts_with_a_skipped_layer_equal_steps(drafts):
    tokens = np.random.default_rng(3).integers(2, 97, (TOKENS, 2))
    compare(drafts("rocketkv", skip_layers=1), prompts_of(240, 37), tokens)


@pytest.mark.parametrize("policy", ["full", "rocketkv", "hybrid", "quest", "sparq"])
def test_a_pass_equals_the_references_steps(drafts, policy):
    draft = drafts(policy)
    engine = draft.engine
    decoder = ReferenceDecoder(
        engine.model, EngineWeights(engine.directory / "weights.safetensors"),
        method=method(engine.parameters), parameters=engine.parameters,
    )  # fmt: skip
    prompt = prompts_of(200)
    result = engine.prefill(prompt)
    _, cache = decoder.prefill(torch.from_numpy(prompt[0])[None], torch.tensor([200]))
    tokens = np.random.default_rng(4).integers(2, 97, (TOKENS, 1))
    found = draft.check(tokens, np.array([200]), result["cache_lengths"], result)
    for number, of_rows in enumerate(tokens):
        expected = decoder.decode(torch.from_numpy(of_rows), cache)
        np.testing.assert_allclose(found["logits"][number], expected, atol=1e-4, rtol=0)
        end = "" if number == TOKENS - 1 else f".token{number}"
        for layer, of_layer in enumerate(cache.caches):
            if of_layer.selected is not None:
                ours = found[f"selected.{layer}{end}"]
                theirs = of_layer.selected.numpy()
                np.testing.assert_array_equal(ours[:, :, : theirs.shape[2]], theirs)


@pytest.mark.slow
@pytest.mark.parametrize("recent", [1, 6])
def test_each_token_of_a_pass_reads_its_own_last_tokens(drafts, recent):
    """Six last tokens lie on two pages or three: a pass of four tokens begins a page on the way."""
    draft, tokens = drafts("rocketkv", recent=recent), np.random.default_rng(2).integers(2, 97, (TOKENS, 2))
    prompts = prompts_of(240, 37)
    compare(draft, prompts, tokens, steps_before=3)
    result = draft.engine.prefill(prompts)
    stored = result["cache_lengths"]
    found = draft.check(tokens, np.array([240, 37]), stored, result)
    for number in range(TOKENS):
        end = "" if number == TOKENS - 1 else f".token{number}"
        selected = found[f"selected.0{end}"]
        for row, entries in enumerate(stored[0] + number + 1):
            last = np.arange(entries - recent, entries)
            assert all(np.isin(last, of_head).all() for of_head in selected[row])


@pytest.mark.parametrize("policy", EVICTING_STEPS)
def test_policies_whose_steps_evict_are_refused(drafts, policy):
    with pytest.raises(InputError, match=f"policy {policy} checks no drafts: a step drops a token"):
        drafts(policy)


def test_each_tensor_is_an_output_after_each_token(drafts):
    names = [output.name for output in drafts("rocketkv").model.graph.output]
    assert len(names) == len(set(names))
    assert {"k_cache_out.0.token0", "k_cache_out.0", "bounds_out.1.token2", "logits"} <= set(names)
