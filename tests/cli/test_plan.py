"""`kvc-trt plan` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.startup import PUBLISHED
from kvc_trt.cli.main import run
from tests.oracles.family_models import ORIGINAL_LENGTH, their_config

HEAVY = ("torch", "onnx", "onnxruntime", "onnxscript", "transformers", "matplotlib", "tokenizers", "huggingface_hub")
# Reading contexts and proofs takes pydantic models and a file format that no plan needs.
OWN_FILES = ("kvc_trt.contexts.file", "kvc_trt.proof.file")
COMMAND = ["plan", "--model", "llama3.1-8b", "--policy", "rocketkv", "--token-budget", "512"]


def test_the_readmes_command_prints_the_plan(capsys):
    assert run([*COMMAND, "--max-input-len", "131072"]) == 0
    printed = capsys.readouterr().out
    for line in ("8.03B parameters", "H200", "(assumed)", "(modelled", "30.07x", "token_budget"):
        assert line in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_json_is_alone_on_stdout(capsys):
    assert run([*COMMAND, "--max-input-len", "32640", "--json"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert captured.err == ""
    assert plan["policy"]["capacity"] == 3191
    assert plan["weights"] == {
        "format": "bf16",
        "assumed": False,
        "parameters": 8030261248,
        "resident_bytes": 16060522496,
        "active_parameters": 8030261248,
        "read_bytes_per_step": 15009849344,
    }
    sources = {choice["name"]: choice["source"] for choice in plan["choices"]}
    assert sources["token_budget"] == "given"
    assert sources["max_output_len"] == "default of the model"
    assert sources["page_size"] == "derived"


def test_plan_shows_a_budget_in_percent_as_such(capsys):
    command = ["plan", "--model", "llama3.1-8b", "--max-input-len", "32640", "--token-budget", "20%"]
    assert run([*command, "--policy", "snapkv-gqa", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["policy"]["token_budget"], plan["policy"]["prompt_budget"]) == (6528, 32 + 6521)
    sources = {choice["name"]: choice["source"] for choice in plan["choices"]}
    assert sources["token_budget"] == "20% of the longest prompt"
    assert sources["prompt_budget"] == "the longest prompt's; each keeps its own share"
    assert run([*command, "--compare"]) == 0
    assert "token budget 6,528" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [[*COMMAND, "--backend", "tensorrt", "--json"], *(["plan", "--model", model] for model in PUBLISHED)],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments):
    script = f"""
import sys
from kvc_trt.cli.main import run
assert run({arguments!r}) == 0
found = sorted(set({HEAVY + OWN_FILES!r}) & set(sys.modules))
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plan_reads_a_hugging_face_directory_and_its_config_alone(tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plans = []
    for model in (tmp_path, tmp_path / "config.json"):
        assert run(["plan", "--model", str(model), "--token-budget", "64", "--max-input-len", "512", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert plans[0]["weights"]["format"] == "fp16"


@pytest.mark.parametrize(("prompt", "side"), [("96", "within"), ("97", "longer than")])
def test_a_plan_says_which_factors_of_longrope_an_engine_has(prompt, side, tmp_path, capsys):
    (tmp_path / "config.json").write_text(their_config("phi3-longrope").to_json_string(), encoding="utf-8")
    limits = ["--max-input-len", prompt, "--max-output-len", str(ORIGINAL_LENGTH - 96)]
    assert run(["plan", "--model", str(tmp_path), "--token-budget", "64", *limits]) == 0
    assert (
        f"rotary: LongRoPE's factors are those of sequences {side} {ORIGINAL_LENGTH} tokens" in capsys.readouterr().out
    )


def test_settings_and_files_are_laid_over_each_other(tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    file.write_text("model: llama3.1-8b\ntoken_budget: 256\nmax_input_len: 16000\n", encoding="utf-8")
    arguments = ["plan", "--config", str(file), "--token-budget", "1024", "--set", "page_size=4", "--weights", "int8"]
    assert run([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["policy"]["token_budget"], plan["policy"]["page_size"]) == (1024, 4)
    assert plan["policy"]["max_input_len"] == 16000
    assert plan["weights"]["format"] == "int8"


def test_a_tensorrt_engine_has_its_gpu_memory_told(capsys):
    arguments = [*COMMAND, "--max-input-len", "131072", "--backend", "tensorrt", "--max-batch-size", "32"]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    for line in (
        "GPU memory of a TensorRT engine with 32 rows",
        "weights of prefill",
        "activations and workspace",
        "layers 0-31: 3,250 slots and 1,088 pages of bounds",
        "H200 (90% of its memory, 118.2 GiB): fits",
    ):
        assert line in printed
    assert run([*arguments, "--policy", "full", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["device_memory"]
    assert memory["gpus"][0]["fits_by_bytes"] < 0
    assert memory["gpus"][0]["what_helps"]


def test_the_batches_of_a_tensorrt_engine_are_those_that_fit_its_own_memory(capsys):
    """Weights are there once for each of its graphs, and every table knows it."""
    arguments = [*COMMAND, "--max-input-len", "131072", "--backend", "tensorrt", "--max-batch-size", "32"]
    assert run([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for gpu, memory in zip(plan["gpus"], plan["device_memory"]["gpus"], strict=True):
        largest = gpu["largest_batch"]["compressed"]
        assert (largest >= 32) == (memory["fits_by_bytes"] >= 0)
        assert run([*arguments[:-1], str(largest), "--json"]) == 0
        fitting = json.loads(capsys.readouterr().out)["device_memory"]["gpus"]
        assert run([*arguments[:-1], str(largest + 1), "--json"]) == 0
        too_many = json.loads(capsys.readouterr().out)["device_memory"]["gpus"]
        [left] = [one["fits_by_bytes"] for one in fitting if one["gpu"] == gpu["name"]]
        [short] = [one["fits_by_bytes"] for one in too_many if one["gpu"] == gpu["name"]]
        assert left >= 0 > short


def test_plan_says_that_a_budget_compresses_nothing(capsys):
    said = "nothing is compressed: with a token budget of {}, a step of the longest sequence, 2,176 tokens, reads"
    for budget, expected in (("1000000", True), ("2176", True), ("1024", False)):
        assert run([*COMMAND[:-1], budget, "--max-input-len", "2048"]) == 0
        assert (said.format(f"{int(budget):,}") in capsys.readouterr().out) == expected
    assert run(["plan", "--model", "llama3.1-8b", "--policy", "full"]) == 0
    assert "nothing is compressed" not in capsys.readouterr().out


def test_a_plan_says_which_policy_it_takes_where_none_is_named(capsys):
    assert run(["plan", "--model", "smollm2-135m-instruct", "--max-output-len", "100"]) == 0
    printed = capsys.readouterr().out
    assert "policy snapkv-gqa, because none is named: " in printed
    assert "token_budget            612  default of the model" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())
    assert run(["plan", "--model", "smollm2-135m-instruct", "--token-budget", "256"]) == 0
    assert "policy rocketkv, because none is named: " in capsys.readouterr().out
    assert run(["plan", "--model", "smollm2-135m-instruct", "--policy", "rocketkv"]) == 0
    assert "because none is named" not in capsys.readouterr().out


def test_memory_under_several_ranks_is_that_of_each_gpu(capsys):
    arguments = ["plan", "--model", "llama3.1-70b", "--memory", "4GiB", "--policy", "full", "--kv-cache", "int8"]
    assert run([*arguments, "--tp", "4"]) == 0
    assert "4.0 GiB for the caches of 1 row on each of 4 GPUs" in capsys.readouterr().out
    assert run([*arguments, "--max-input-len", "1000"]) == 0
    assert "on each" not in capsys.readouterr().out


def test_a_window_of_a_configuration_file_holds_in_a_comparison(tmp_path, capsys):
    file = tmp_path / "build.yaml"
    file.write_text("model: llama3.1-8b\ntoken_budget: 160\nmax_output_len: 128\n")
    compared = ["plan", "--config", str(file), "--compare", "--json"]
    assert run(compared) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["policies"]}
    assert "stored_bytes" in rows["snapkv-gqa"]
    file.write_text(f"{file.read_text()}window: 64\n")
    assert run(compared) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["policies"]}
    assert "observation window of 64" in rows["snapkv-gqa"]["not_applicable"]
    assert "stored_bytes" in rows["full"]


def test_plan_shows_only_the_gpus_that_are_named(capsys):
    assert run([*COMMAND, "--gpu", "a100", "--gpu", "mine=900GB/s,120,24", "--gpu", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "A100" in printed
    assert "mine" in printed
    assert "H100" not in printed
    assert run([*COMMAND, "--gpu", "a1000"]) == 2
    assert "did you mean 'a100'" in capsys.readouterr().err


def test_plan_lists_the_budgets_that_fit_a_memory(capsys):
    arguments = ["plan", "--model", "smollm2-135m-instruct", "--memory", "12MiB", "--gpu", "cpu=20GB/s,0.5,8"]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    for line in (
        "12.0 MiB for the caches of 1 row",
        "step, ms: cpu",
        "snapkv-gqa                 int8             1,028  12.0 MiB     1",
        "full: does not fit; at least auto 191.2 MiB",
    ):
        assert line in printed
    assert "exact-topk" not in printed
    assert all(len(line) <= 120 for line in printed.splitlines())
    assert run([*arguments, "--policy", "tova", "--rows", "2", "--json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert {entry["policy"] for entry in table["budgets"]} == {"tova"}
    assert table["memory_bytes"] == 12 << 20


def test_budgets_that_compress_nothing_are_counted_and_shown_for_one_policy(capsys):
    arguments = ["plan", "--model", "smollm2-135m-instruct", "--memory", "60MiB", "--gpu", "cpu=20GB/s,0.5,8"]
    assert run(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    everything = [line.split()[0] for line in printed if line.endswith("reads everything")]
    assert everything == ["full"] * 4
    [counted] = [line for line in printed if "compress nothing" in line]
    assert run([*arguments, "--json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    others = [one for one in table["budgets"] if one["policy"] != "full" and one.get("compresses") is False]
    assert counted.startswith(f"{len(others)} others would hold the whole sequence")
    assert run([*arguments, "--policy", "tova"]) == 0
    assert capsys.readouterr().out.count("reads everything") == 4


@pytest.mark.parametrize("written", ["12 foo", "0MiB", "-1GiB", "twelve"])
def test_other_memories_are_refused(capsys, written):
    assert run(["plan", "--model", "smollm2-135m-instruct", f"--memory={written}"]) == 2
    assert "is not a size such as 2GiB" in capsys.readouterr().err


def test_plan_predicts_requests_per_second_of_a_mix(tmp_path, capsys):
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        "concurrency: 32\nrequests:\n  - {input: 30000, output: 128, weight: 3}\n  - {input: 4000, output: 500}\n"
    )
    assert run([*COMMAND, "--mix", str(mix)]) == 0
    printed = capsys.readouterr().out
    assert "requests per second, predicted: 32 callers, 23,500 tokens in, 221 out on average" in printed
    assert "a prediction, not a measurement" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_prefill_and_decode_apart_know_what_fits_and_ranks(capsys):
    arguments = ["plan", "--model", "llama3.1-70b", "--token-budget", "2048", "--max-input-len", "32640"]
    assert run([*arguments, "--disaggregated", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["disaggregation"]["replicas"]
    assert [one["prefill_seconds"] for one in alone] == [None, None]
    assert [one["compressed"]["rows"] for one in alone] == [0, 0]
    assert run([*arguments, "--disaggregated"]) == 0
    assert "no row fits" in capsys.readouterr().out
    assert run([*arguments, "--disaggregated", "--tp", "4", "--json"]) == 0
    divided = json.loads(capsys.readouterr().out)
    replica, gpu = divided["disaggregation"]["replicas"][0], divided["gpus"][0]
    assert replica["prefill_seconds"] == pytest.approx(gpu["first_token_floor_ms"] / 1e3)
    assert replica["compressed"]["rows"] == min(32, gpu["largest_batch"]["compressed"])


def test_a_plan_without_a_gpu_backend_has_no_gpu_memory(capsys):
    assert run([*COMMAND, "--json"]) == 0
    assert not {"device_memory", "host_memory"} & json.loads(capsys.readouterr().out).keys()


def test_an_engine_of_the_host_has_its_copies_rows_and_prefixes_told(capsys, monkeypatch):
    monkeypatch.setenv("KVC_TRT_CPU_KERNELS", "none")
    arguments = ["plan", "--model", "smollm2-135m-instruct", "--policy", "rocketkv", "--max-batch-size", "5"]
    arguments += ["--weights", "fp32", "--backend", "onnxruntime", "--draft-tokens", "4"]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    for line in (
        "memory of the host with 5 rows (a conversation keeps its row between turns)",
        "weights packed for steps",
        "weights packed for passes over drafts",
        "caches of 5 rows",
        "one more row: ",
        "one stored prefix of the longest prompt: ",
    ):
        assert line in printed
    assert run([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    memory = plan["host_memory"]
    assert memory["total_bytes"] == pytest.approx(sum(line["bytes"] for line in memory["lines"]), abs=5)
    assert memory["bytes_per_further_row"] == plan["cache"]["compressed_bytes_per_row"]
    assert memory["bytes_per_prefix"] == plan["context"]["bytes"]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (["policy=pyramidkv"], ["layers 0-7: 847, 826,", "layers 24-31: 343,", "this policy, on average"]),
        (["policy=h2o", "skip_layers=2"], ["layers 0-1: 32,896 slots", "layers 2-31: 513 slots"]),
        (["policy=snapkv"], ["896 "]),  # four query heads per KV head, 96 prompt tokens and 128 new ones each
        (["layer_budget=squeeze"], ["layer budgets: measured on calibration prompts"]),
        (["layer_budget=squeeze-online"], ["layer budgets: set for each prompt, 3,0", "room for 2 times that"]),
        (["layer_budget=squeeze-online", "squeeze_cap=3.5"], ["room for 3.5 times that"]),
    ],
)
def test_layers_that_differ_are_told_apart(settings, lines, capsys):
    given = [part for setting in settings for part in ("--set", setting)]
    assert run(["plan", "--model", "llama3.1-8b", "--token-budget", "512", *given]) == 0
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_plan_lists_layers_with_several_caches(tmp_path, capsys):
    pattern = tmp_path / "pattern.tsv"
    pattern.write_text("\n".join(["1 1 1 0 0 0 0 0", *["0 0 0 0 0 0 0 0"] * 31]), encoding="utf-8")
    arguments = ["--policy", "duo-attention", "--token-budget", "1024", "--set", f"head_pattern={pattern}"]
    assert run(["plan", "--model", "llama3.1-8b", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "layer 0: 3 KV heads of 32,896 slots; 5 KV heads of 640 slots" in printed
    assert "layers 1-31: 640 slots" in printed


def test_linear_layers_are_there_without_a_cache(capsys):
    command = ["plan", "--model", "qwen3.5-9b", "--policy", "rocketkv"]
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert "layers 0-2, 4-6, 8-10, 12-14, 16-18, 20-22, 24-26, 28-30: no cache, a state of constant size" in printed
    assert "layers 3, 7, 11, 15, 19, 23, 27, 31: 3,192 slots" in printed
    assert "this policy, on average" not in printed
    assert (
        "\n24 layers are linear, with a state of constant size: a step reads and writes all 49.1 MiB of it\n" in printed
    )
    assert "bounds and other state 33.2 MiB, linear state 49.1 MiB, positions 399.0 KiB" in printed
    assert run([*command, "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    layers = cache["layers"]
    last_inputs, memory = 3 * (2 * 2048 + 4096) * 2, 32 * 128 * 128 * 4
    assert cache["linear_state_bytes_per_row"] == 24 * (last_inputs + memory) < cache["page_bounds_bytes_per_row"]
    assert [layer for layer, caches in enumerate(layers) if caches] == list(range(3, 32, 4))
    assert len(layers) == 32


def test_a_plan_says_that_every_layer_keeps_its_window(capsys):
    command = ["plan", "--model", "mistral-7b-v0.1", "--policy", "full", "--max-output-len", "128", "--max-input-len"]
    said = "32 of 32 layers slide and keep their window of 4,096 tokens exactly"
    assert run([*command, "3968"]) == 0
    printed = capsys.readouterr().out
    assert said not in printed
    assert "4,096  derived: cache slots per compressed layer" in printed
    assert run([*command, "16384"]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    assert "derived: cache slots" not in printed  # no layer is compressed
    assert run([*command, "16384", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache["full_bytes_per_row"] == cache["compressed_bytes_per_row"] == 512 << 20


def test_a_comparison_past_the_window_of_every_layer_has_the_whole_cache_alone(capsys):
    command = ["plan", "--model", "mistral-7b-v0.1", "--max-input-len", "16384", "--compare", "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["policies"] if "not_applicable" not in one] == ["full"]
    assert {one["stored_share"] for one in found["policies"] if "not_applicable" not in one} == {1.0}


def test_plan_says_that_dense_until_auto_is_measured_at_build(capsys):
    assert run([*COMMAND, "--set", "dense_until=auto"]) == 0
    assert "measured when the engine is built" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan"], "no model given"),
        (["plan", "--model", "lama3.1-8b"], "llama3.1-8b"),
        (["plan", "--model", "llama3.1-8b", "--policy", "rocketvk"], "rocketkv"),
        (["plan", "--model", "llama3.1-8b", "--token-budget", "8"], "16"),
        (["plan", "--model", "llama3.1-8b", "--set", "pagesize=4"], "page_size"),
        (["plan", "--model", "llama3.1-8b", "--backend", "tensorrt", "--weights", "int4"], "int4"),
        (
            ["plan", "--model", "mistral-7b-v0.1", "--max-input-len", "16000"],
            "MistralForCausalLM 32 of 32 slide in sequences of 16128 tokens\nhint: --policy full, with which each "
            "keeps its window, or sequences of at most 4096 tokens",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line_with_exit_code_2(arguments, expected, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


DISAGGREGATED = [*COMMAND, "--max-input-len", "131072", "--disaggregated"]


def test_plan_estimates_prefill_and_decode_on_different_machines(capsys):
    assert run([*DISAGGREGATED, "--bandwidth", "12.5GB/s"]) == 0
    printed = capsys.readouterr().out
    assert "131,072 tokens over 12.5 GB/s" in printed
    assert "(estimates)" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())
    assert run([*DISAGGREGATED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["disaggregation"]
    assert found["bandwidth"] == 12.5e9
    assert found["compressed"]["bytes"] < found["full"]["bytes"]


@pytest.mark.parametrize(
    ("written", "expected"), [("100Gbit/s", 12.5e9), ("900 MB/s", 9e8), ("1TB/s", 1e12), ("3kB/s", 3e3), ("8B/s", 8.0)]
)
def test_bandwidths_have_units(capsys, written, expected):
    assert run([*DISAGGREGATED, "--bandwidth", written, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disaggregation"]["bandwidth"] == expected


@pytest.mark.parametrize("written", ["12.5", "0GB/s", "-1GB/s", "fast", "1GiB/s", "1e3GB/s", "GB/s"])
def test_other_bandwidths_are_refused(capsys, written):
    assert run([*DISAGGREGATED, f"--bandwidth={written}"]) == 2
    assert "not a bandwidth such as 12.5GB/s" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--bandwidth", "1GB/s"], ["--disaggregated", "--compare"]])
def test_options_that_exclude_each_other_are_refused(capsys, wrong):
    assert run([*COMMAND, "--max-input-len", "32640", *wrong]) == 2
    assert "--disaggregated" in capsys.readouterr().err


@pytest.mark.parametrize("kv_cache", ["auto", "int8", "fp8", "int4", "k8v4"])
def test_bytes_are_those_of_the_format_and_add_up(capsys, kv_cache):
    assert run([*COMMAND, "--max-input-len", "32640", "--kv-cache", kv_cache, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    cache, tokens = plan["cache"], 32640 + 128
    of_token = {"auto": 512, "int8": 260, "fp8": 258, "int4": 160, "k8v4": 210}[kv_cache]  # key and value of a head
    assert cache["format"] == plan["policy"]["kv_cache"] == kv_cache
    assert cache["full_bytes_per_row"] == 32 * 8 * tokens * of_token
    assert cache["keys_values_bytes_per_row"] + cache["scales_bytes_per_row"] == 32 * 8 * 3191 * of_token
    parts = ("keys_values", "scales", "page_bounds")
    assert sum(cache[f"{part}_bytes_per_row"] for part in parts) == cache["compressed_bytes_per_row"]
    assert plan["policy"]["fp8_bounds"] == (kv_cache != "auto")


def test_a_step_reads_the_bytes_of_its_format(capsys):
    read = {}
    for kv_cache in ("auto", "int8"):
        assert run([*COMMAND, "--policy", "full", "--kv-cache", kv_cache, "--json"]) == 0
        read[kv_cache] = json.loads(capsys.readouterr().out)["traffic"]["bytes_per_row"]
    assert read["int8"] / read["auto"] == 260 / 512


def test_a_comparison_has_whole_caches_in_the_other_formats(capsys):
    compare = ["plan", "--model", "llama3.1-8b", "--token-budget", "512", "--compare"]
    for usual, others in (("auto", ["int8", "fp8", "int4", "k8v4"]), ("fp8", ["auto", "int8", "int4", "k8v4"])):
        assert run([*compare, "--kv-cache", usual, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        full = found["policies"][0]
        assert (full["policy"], full["kv_cache"], full["stored_share"]) == ("full", usual, 1.0)
        whole = found["whole_caches"]
        assert [(row["policy"], row["kv_cache"]) for row in whole] == [("full", other) for other in others]
        smaller = [row["stored_bytes"] < full["stored_bytes"] for row in whole]
        assert smaller == [other != "auto" and (usual == "auto" or other != "int8") for other in others]
    assert run([*compare, "--kv-cache", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "full in auto" in printed
    assert "per row (kv-cache int8)" in printed


def test_a_tiny_model_has_figures_that_are_not_zeros(capsys):
    assert run(["plan", "--model", "retrieval-tiny"]) == 0
    printed = capsys.readouterr().out
    assert "527K parameters" in printed
    floors = [line.split() for line in printed.split("floor of a step")[1].splitlines()[3:9]]
    assert all(float(row[2]) > 0 and float(row[4]) > 0 for row in floors)
    assert "    0.0\n" not in printed


@pytest.mark.parametrize("path", ["nothere/", "."])
def test_a_path_without_a_checkpoint_is_refused_with_what_there_could_be(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "--model", path]) == 2
    error = capsys.readouterr().err
    assert "config.json: No such file" in error
    assert "\nhint: --model NAME (kvc-trt models), a directory with config.json" in error
