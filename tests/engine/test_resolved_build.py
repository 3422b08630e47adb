from __future__ import annotations

import dataclasses

import pytest

from kvc_trt import policies
from kvc_trt.backends.onnxruntime.backend import OnnxRuntimeBackend
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.calibration import calibrated
from kvc_trt.engine.resolution.model_choice import choose_model, open_source
from kvc_trt.engine.resolution.resolve import for_source, resolve
from kvc_trt.engine.resolution.resolved_build import default_taken, weight_bytes, with_defaults
from kvc_trt.errors import InputError
from kvc_trt.graph.weights import write_weights
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.progress import NullProgress


class Measured(OnnxRuntimeBackend):
    """ONNX Runtime, whose break-even is known, or must not be asked for."""

    def __init__(self, tokens=None):
        self.tokens = tokens

    def break_even(self, model, parameters, dtype):
        return self.tokens or pytest.fail("measured")


def resolved(config, *, break_even=None, **options):
    choice = choose_model(config.model, config.checkpoint)
    return resolve(config, choice, "onnxruntime", {"onnxruntime": Measured(break_even)}, **options)


def build(model, **settings):
    return BuildConfig(**{"model": str(model), "random_weights": 0, "max_output_len": 32, **settings})


def test_a_resolved_build_has_a_value_for_every_setting(tiny_model):
    request = resolved(build(tiny_model))
    assert request.config.backend == "onnxruntime"
    assert request.config.weights == "fp32"
    assert request.config.token_budget == 512
    assert request.config.max_input_len == 1024 - 128
    assert request.model.dtype == request.dtype == "float32"
    assert resolved(build(tiny_model, weights="fp16", token_budget=64)).dtype == "float16"


def test_resolving_what_was_resolved_changes_nothing(tiny_model):
    once = resolved(build(tiny_model, token_budget=64, split="even", page_size=3))
    assert resolved(once.config) == once


def test_a_presets_defaults_yield_to_the_user_and_to_the_policy():
    choice = choose_model("retrieval-tiny")
    config = with_defaults(BuildConfig(model="retrieval-tiny"), choice)
    assert (config.token_budget, config.pool_kernel) == (64, 7)
    config = with_defaults(BuildConfig(model="retrieval-tiny", pool_kernel=9, token_budget=128), choice)
    assert (config.token_budget, config.pool_kernel) == (128, 9)
    assert with_defaults(BuildConfig(model="retrieval-tiny", policy="full"), choice).pool_kernel is None
    assert with_defaults(BuildConfig(model="retrieval-tiny", policy="rocketkv-v2"), choice).pool_kernel is None


def test_a_recommended_policy_counts_where_none_is_named():
    choice = choose_model("smollm2-135m-instruct")
    assert choice.recommended is not None

    def taken(**settings):
        config = BuildConfig(model=choice.name, **settings)
        filled = with_defaults(config, choice)
        return (filled.policy, filled.token_budget, filled.pool_kernel), default_taken(config, choice)

    recommended, said = taken()
    assert recommended == ("snapkv-gqa", 512 + 256, 17)
    assert said == f"policy snapkv-gqa, because none is named: {choice.recommended.why}"
    assert taken(max_output_len=1024) == (("snapkv-gqa", 512 + 1024, 17), said)
    assert taken(max_output_len=1024, pool_kernel=7)[0] == ("snapkv-gqa", 512 + 1024, 7)
    assert taken(policy="snapkv-gqa") == (("snapkv-gqa", 256, None), None)
    assert taken(policy="rocketkv") == (("rocketkv", 256, None), None)


def test_a_recommendation_claims_nothing_for_numbers_that_were_not_measured():
    choice = choose_model("smollm2-135m-instruct")
    said = default_taken(BuildConfig(model=choice.name, pool_kernel=7, window=16), choice)
    assert said is not None
    assert said.endswith("; that was measured with 512 tokens of a prompt and not with this pool_kernel and window")


@pytest.mark.parametrize("budget", [256, 1000, "50%"])
def test_a_build_that_names_a_budget_alone_takes_the_usual_policy_and_can_be_built(budget):
    """The budget of snapkv-gqa holds the answer too, so 256 tokens would leave none for the prompt."""
    choice = choose_model("smollm2-135m-instruct")
    config = BuildConfig(model=choice.name, token_budget=budget)
    found = resolved(config)
    assert (found.config.policy, found.config.token_budget) == ("rocketkv", budget)
    assert found.parameters.policy == "rocketkv"
    said = default_taken(config, choice) or ""
    assert said.startswith("policy rocketkv, because none is named: snapkv-gqa is recommended where no budget is named")


def test_a_build_for_conversations_takes_no_recommendation():
    choice = choose_model("smollm2-135m-instruct")
    config = BuildConfig(model=choice.name, max_conversation_len=8192)
    assert (with_defaults(config, choice).policy, with_defaults(config, choice).token_budget) == ("rocketkv", 256)
    assert "is recommended for one prompt at a time" in (default_taken(config, choice) or "")


def test_a_model_without_a_recommendation_says_how_to_choose(tiny_model):
    said = default_taken(build(tiny_model), choose_model(str(tiny_model)))
    assert said is not None
    assert said.startswith("policy rocketkv, because none is named: ")


def test_recorded_numbers_are_pinned_only_where_they_differ(tiny_model):
    plain = resolved(build(tiny_model, token_budget=64))
    recorded = dataclasses.asdict(plain.parameters)
    assert resolved(build(tiny_model, token_budget=64), recorded=recorded) == plain
    pinned = resolved(build(tiny_model, token_budget=64), recorded={**recorded, "top_r": 3})
    assert pinned.config.top_r == pinned.parameters.top_r == 3
    assert pinned.config.page_size is None


def test_an_engine_that_records_no_by_length_is_built_again_as_it_was(tiny_model):
    older = resolved(build(tiny_model, token_budget=64, by_length=False))
    recorded = dataclasses.asdict(older.parameters)
    for name in ("by_length", "long_prompt", "short_pool_kernel"):
        del recorded[name]
    again = resolved(build(tiny_model, token_budget=64), recorded=recorded)
    assert again.parameters == older.parameters
    assert resolved(build(tiny_model, token_budget=64)).parameters.by_length
    assert not resolved(build(tiny_model, policy="snapkv-gqa", token_budget=64), recorded={}).parameters.by_length


def test_budgets_by_length_are_derived_again(tiny_model):
    """They are no number of the engine: only the largest one is recorded."""
    recorded = dataclasses.asdict(resolved(build(tiny_model, token_budget=64)).parameters)
    again = resolved(build(tiny_model, token_budget=64), recorded={**recorded, "prompt_budget": 77})
    assert again.parameters.prompt_budget == recorded["prompt_budget"]


def test_a_share_is_recorded_and_derived_again(tiny_model):
    share = resolved(build(tiny_model, policy="snapkv-gqa", token_budget="50%"))
    assert (share.config.token_budget, share.parameters.prompt_share) == ("50%", 0.5)
    recorded = dataclasses.asdict(share.parameters)
    again = resolved(build(tiny_model, policy="snapkv-gqa", token_budget="50%"), recorded=recorded)
    assert again == share


def test_the_numbers_of_a_policy_are_derived_once(tiny_model, monkeypatch):
    """Unless something is found on the way that decides on them, such as a break-even."""
    derived = []
    resolve_policy = policies.resolve
    monkeypatch.setattr(
        policies, "resolve", lambda *given, **more: derived.append(given) or resolve_policy(*given, **more)
    )
    for dense_until, times in ((None, 1), ("auto", 2)):
        derived.clear()
        request = resolved(build(tiny_model, token_budget=64, weights="fp16", dense_until=dense_until), break_even=100)
        choice, source = open_source(choose_model(request.config.model), request.config)
        made = calibrated(for_source(request, choice, source), source, NullProgress())
        assert made.parameters.dense_until == (100 if dense_until else made.parameters.token_budget)
        assert made.model.dtype == "float16"
        assert len(derived) == times


def test_the_break_even_is_that_of_one_rank(tiny_model):
    """A rank attends with fewer heads, so selection pays off later than on one GPU."""
    found = []

    class OnRanks(Measured):
        own_settings = (*OnnxRuntimeBackend.own_settings, "tensor_parallel")

        def break_even(self, model, parameters, dtype):
            found.append((model.num_attention_heads, model.num_key_value_heads))
            return 100

    choice = choose_model(str(tiny_model))
    for ranks in (None, 2, 4):
        config = build(tiny_model, token_budget=64, dense_until="auto", tensor_parallel=ranks)
        resolve(config, choice, "onnxruntime", {"onnxruntime": OnRanks()})
    assert found == [(4, 2), (2, 1), (2, 1)]


def test_the_break_even_is_measured_for_selecting_policies_alone(tiny_model):
    measured = resolved(build(tiny_model, token_budget=64, dense_until="auto"), break_even=100)
    assert measured.config.dense_until == measured.parameters.dense_until == 100
    dense = resolved(build(tiny_model, policy="snapkv++", token_budget=64, dense_until="auto"))
    assert dense.config.dense_until is None


def test_paths_are_stored_so_that_they_work_from_anywhere(tiny_model, monkeypatch):
    monkeypatch.chdir(tiny_model.parent)
    request = resolved(build(f"./{tiny_model.name}", token_budget=64))
    choice, source = open_source(choose_model(request.config.model), request.config)
    assert for_source(request, choice, source).config.model == str(tiny_model)


def test_the_pattern_of_heads_is_stored_so_that_it_is_found_from_anywhere(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads.tsv").write_text("1 0\n" * choose_model(str(tiny_model)).config.num_hidden_layers)
    config = build(tiny_model, policy="duo-attention", token_budget=64, head_pattern="heads.tsv")
    choice, source = open_source(choose_model(config.model), config)
    assert for_source(resolved(config), choice, source).config.head_pattern == str(tmp_path / "heads.tsv")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8", "int4"])
def test_the_weight_files_size_is_known_before_it_is_written(tiny_model, tmp_path, weights, tied):
    model = dataclasses.replace(
        choose_model(str(tiny_model)).config, vocab_size=4096, hidden_size=128, head_size=32, tie_word_embeddings=tied
    )
    write_weights(model, RandomWeights(model, 0), tmp_path / "weights", weights=weights, length=8)
    expected = weight_bytes(model, weights)
    assert expected == pytest.approx((tmp_path / "weights").stat().st_size, rel=0.02)


def test_a_checkpoint_goes_with_a_presets_name(tiny_model):
    with pytest.raises(InputError, match="checkpoint already"):
        choose_model(str(tiny_model), str(tiny_model))
