"""The policies that each backend's engines support, and the messages about the others."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvc_trt.backends.registry import backends, names
from kvc_trt.backends.torch.policy_path import policy_path
from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.engine.resolution.resolve import resolve
from kvc_trt.engine.supported import check_supported
from kvc_trt.errors import InputError
from kvc_trt.methods.base.registry import describe
from kvc_trt.methods.base.registry import resolve as resolve_policy
from tests import every_policy
from tests.every_policy import EVERY
from tests.graph.small_models import LLAMA
from tests.graph.small_models import resolve as parameters_of

WITH_KERNELS = ("tensorrt", "tensorrt-llm")
NEED_NONE = ("quest", "sparq", "h2o", "streaming-llm", "sliding-window", "snapkv", "tova", "keydiff")
NEED_NONE += ("expected-attention", "expected-attention-hybrid")


@pytest.mark.parametrize("backend", names())
@pytest.mark.parametrize("policy", ["full", "rocketkv", "snapkv++", "hybrid", "snapkv-gqa", "quest-matched"])
def test_every_backend_runs_the_policies_with_kernels(policy, backend):
    assert backends()[backend].missing(parameters_of(policy), LLAMA.num_hidden_layers) is None


@pytest.mark.parametrize("backend", names())
def test_a_fixed_budget_for_each_layer_is_a_number_of_each_operator(backend):
    parameters = replace(parameters_of("rocketkv"), layer_budgets=(60, 40, 30))
    assert backends()[backend].missing(parameters, LLAMA.num_hidden_layers) is None


@pytest.mark.parametrize("backend", WITH_KERNELS)
@pytest.mark.parametrize("policy", NEED_NONE)
def test_policies_without_kernels_are_refused_with_the_backends_that_run_them(policy, backend):
    parameters = parameters_of(policy, **({"window": 8, "pool_kernel": 7} if policy == "snapkv" else {}))
    with pytest.raises(InputError) as caught:
        check_supported(parameters, LLAMA, backend, backends())
    assert f"policy {policy}: backend {backend} has no kernel for " in caught.value.message
    assert caught.value.message.endswith("; it runs on onnxruntime, openvino, torch")
    assert caught.value.hint == "--backend onnxruntime"
    check_supported(parameters, LLAMA, "onnxruntime", backends())


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"squeeze_share": 0.35}, "kernel that divides a budget for each prompt"),
        ({"retrieval_heads": ((True, False),) * 3}, "kernel for layers whose KV heads are cached separately"),
        ({"positions": "cache"}, "kernel for this form of the policy"),
        ({"per_query_head": True}, "kernel for this form of the policy"),
    ],
)
def test_forms_of_a_policy_without_a_kernel_name_what_is_missing(changes, missing):
    parameters = replace(parameters_of("rocketkv"), **changes)
    for backend in WITH_KERNELS:
        assert backends()[backend].missing(parameters, LLAMA.num_hidden_layers) == missing
    in_pytorch = backends()["torch"].missing(parameters, LLAMA.num_hidden_layers)
    assert in_pytorch == (missing if "squeeze_share" in changes else None)


def test_average_pooling_has_no_kernel_and_pytorch_says_what_runs():
    averages = replace(parameters_of("rocketkv"), pool_kind="avg")
    for backend in WITH_KERNELS:
        with pytest.raises(
            InputError, match=f"{backend} has no kernel for pool_kind avg, only for max; it runs on onnx"
        ):
            check_supported(averages, LLAMA, backend, backends())
    assert backends()["torch"].missing(averages, LLAMA.num_hidden_layers) is None
    assert str(policy_path(LLAMA, averages)).startswith("rocketkv: prompt eviction runs as PyTorch operations")


def test_an_oracle_has_no_engine_at_all():
    parameters = replace(parameters_of("hybrid"), policy="exact-topk", decode_selection="exact-topk")
    for backend in names():
        with pytest.raises(InputError, match=r"policy exact-topk: .*; only the reference runs it"):
            check_supported(parameters, LLAMA, backend, backends())


def test_every_policy_of_the_registry_is_served_or_refused_by_name():
    for description in describe():
        rule = replace(
            parameters_of("hybrid"),
            prompt_eviction=description.prompt_eviction,
            decode_selection=description.decode_selection,
        )
        served = description.prompt_eviction in ("none", "snapkv++") and description.decode_selection in (
            "dense",
            "hybrid",
        )
        for backend in WITH_KERNELS:
            assert (backends()[backend].missing(rule, 1) is None) == served, description.name
        assert (backends()["torch"].missing(rule, 1) is None) != rule.selection.oracle, description.name


@pytest.mark.parametrize("backend", WITH_KERNELS)
def test_a_build_is_refused_before_any_work(tiny_model, backend):
    settings = {"token_budget": 64, "max_input_len": 128, "max_output_len": 32, "random_weights": 0}
    config = BuildConfig(model=str(tiny_model), policy="sparq", **settings)
    with pytest.raises(InputError, match=f"policy sparq: backend {backend} has no kernel for decode selection sparq"):
        resolve(config, choose_model(str(tiny_model)), backend, backends())


def test_a_plan_for_a_backend_that_cannot_have_it_is_refused(tiny_model, capsys):
    command = [
        "plan",
        "--model",
        str(tiny_model),
        "--policy",
        "sparq",
        "--token-budget",
        "64",
        "--max-output-len",
        "32",
    ]
    assert run([*command, "--backend", "tensorrt"]) == 2
    assert "policy sparq: backend tensorrt has no kernel" in capsys.readouterr().err
    assert run(command) == 0


@pytest.mark.slow
def test_an_engine_without_kernels_runs_in_pytorch_and_says_so(tiny_model, tmp_path, capfd):
    lengths = ["--token-budget", "64", "--max-input-len", "128", "--max-output-len", "32"]
    engine, prompts = tmp_path / "engine", tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[3, 4, 5] * 30, [7, 8]]))
    said = "streaming-llm: prompt eviction, selection and attention run as PyTorch operations, no kernel of ours"
    command = ["build", "--model", str(tiny_model), "--random-weights", "0", "--policy", "streaming-llm", *lengths]
    assert run([*command, "--backend", "torch", "--no-verify", "-o", str(engine)]) == 0
    assert said in capfd.readouterr().out.splitlines()
    assert run([*command, "--backend", "torch", "--no-verify", "-o", str(engine), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["without_kernels"] == said
    answer = ["run", str(engine), "--prompt-ids", str(prompts), "--max-new-tokens", "3"]
    assert run(answer) == 0
    assert capfd.readouterr().err.splitlines()[-1].endswith(f" | {said}")
    assert run([*answer, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["kernels"] == said
    assert run(["profile", str(engine), "--contexts", "64", "--batch", "1", "--steps", "1", "--json"]) == 0
    assert said in json.loads(capfd.readouterr().out)["findings"]
    assert run(["verify", str(engine), "--level", "ops", "--steps", "1"]) == 0
    assert said in capfd.readouterr().out.splitlines()


def test_an_engine_with_kernels_says_nothing(tiny_model, tmp_path, capfd):
    lengths = ["--token-budget", "64", "--max-input-len", "128", "--max-output-len", "32"]
    command = ["build", "--model", str(tiny_model), "--random-weights", "0", "--policy", "hybrid", *lengths]
    assert run([*command, "--backend", "torch", "--no-verify", "-o", str(tmp_path / "engine"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["without_kernels"] is None


@pytest.mark.parametrize("backend", names())
@pytest.mark.parametrize("kv_cache", ["int8", "fp8", "int4", "k8v4"])
def test_a_format_that_a_backend_does_not_store_is_refused_by_name(backend, kv_cache):
    parameters = parameters_of("rocketkv", kv_cache=kv_cache)
    able = ["onnxruntime", "openvino", "tensorrt", "torch"]
    if backend in able:
        check_supported(parameters, LLAMA, backend, backends())
        return
    with pytest.raises(InputError) as caught:
        check_supported(parameters, LLAMA, backend, backends())
    expected = f"backend {backend} has no caches in {kv_cache}, only in auto; it runs on {', '.join(able)}"
    assert expected in caught.value.message
    assert caught.value.hint == "--backend onnxruntime"


def test_codes_of_4_bits_need_an_even_head_size():
    lengths = {"token_budget": None, "max_input_len": 128, "max_output_len": 32}
    odd = replace(LLAMA, head_size=33)
    for kv_cache in ("int4", "k8v4"):
        with pytest.raises(InputError, match=f"kv_cache is '{kv_cache}'.*expected an even head size, found 33"):
            resolve_policy("full", model=odd, **lengths, kv_cache=kv_cache)
    resolve_policy("full", model=odd, **lengths, kv_cache="int8")


@pytest.mark.parametrize("policy", EVERY)
def test_every_policy_takes_a_format_and_bounds_of_pages_are_in_fp8(policy):
    def bounds(kv_cache, **settings):
        found = every_policy.parameters_of(policy, kv_cache=kv_cache, **settings)
        assert {group.parameters.kv_cache for layer in range(3) for group in found.groups(layer)} == {kv_cache}
        return found.fp8_bounds

    assert not bounds("auto")
    pages = every_policy.parameters_of(policy).selection.pages
    assert bounds("int8") == pages
    if pages:
        assert not bounds("int8", fp8_bounds=False)


def test_bounds_in_16_bits_beside_codes_are_refused(tiny_model):
    settings = {"token_budget": 64, "max_input_len": 128, "max_output_len": 32, "random_weights": 0}
    choice = choose_model(str(tiny_model))

    def resolved(weights, **changes):
        config = BuildConfig(model=str(tiny_model), policy="rocketkv", weights=weights, **settings, **changes)
        return resolve(config, choice, "onnxruntime", backends()).parameters.fp8_bounds

    with pytest.raises(InputError, match="page bounds of a cache in int8 are fp8 or float32, and this engine computes"):
        resolved("fp16", kv_cache="int8", fp8_bounds=False)
    assert not resolved("fp32", kv_cache="int8", fp8_bounds=False)
    assert resolved("fp16", kv_cache="int8")
    assert not resolved("fp16", fp8_bounds=False)
