"""Sliding layers on ranks: each has the rings of its KV heads, and runs them by the nodes that one process runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import kvc_trt
from kvc_trt import Engine
from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
from kvc_trt.backends.torch.parallel.forecast import rank_memory
from kvc_trt.cli.main import run as command
from kvc_trt.engine.program import twin_program
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.sharding import shards
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from kvc_trt.verify.ladder import verify
from tests.backends.prompts import prompts
from tests.backends.torch.parallel.sliding_models import COMMAND_R7B, GEMMA_3, WINDOW
from tests.conftest import TINY_MODEL

pytestmark = pytest.mark.slow
STEPS = 12
"""More than a ring has slots."""
LENGTHS = {"max_input_len": 256, "max_output_len": 48}
QUESTIONS = tuple(enumerate((70, 3, 25)))
"""A seed and a length of each text of a conversation: of a prompt, and of turns within the window and beyond it."""
POLICIES = ("rocketkv", "snapkv++", "hybrid", "snapkv-gqa")


@pytest.mark.parametrize("model", [GEMMA_3, COMMAND_R7B], ids=["Gemma 3", "Command R7B"])
def test_policies_give_what_they_give_in_one_process(model, make_program, on_shared_ranks, of_policy):
    """Prompts of 200 and 31 tokens fill a ring, and one of a single token wraps in its steps."""
    program = make_program("full", model=model)
    group = on_shared_ranks(program, 2).group
    others = [of_policy(program, policy) for policy in POLICIES]
    for each in (program, *others, twin_program(others[0])):
        expected = run(TorchExecutor(each), batch_of(prompts()), STEPS)
        executor = ParallelExecutor(each, group)
        found = run(executor, batch_of(prompts()), STEPS, tokens=expected.tokens)
        scale = max(1.0, np.abs(expected.logits).max())
        assert np.abs(found.logits - expected.logits).max() <= 1e-5 * scale, each.parameters.policy
        np.testing.assert_array_equal(found.logits.argmax(-1), expected.logits.argmax(-1))
        np.testing.assert_array_equal(found.cache_lengths, expected.cache_lengths)
        assert executor.buffers["k_cache.0"].shape[2] == WINDOW < STEPS


@pytest.mark.parametrize("ranks", [2, 4])
def test_turns_between_steps_give_what_they_give_in_one_process(ranks, make_program, on_shared_ranks):
    """Turns shorter and longer than the window, after steps that have wrapped the rings."""
    program = make_program("rocketkv", model=GEMMA_3, turns=True, max_input_len=256, max_output_len=100)
    executors, generator = (TorchExecutor(program), on_shared_ranks(program, ranks)), np.random.default_rng(0)
    text, lengths = generator.integers(2, 97, (2, 90)), np.array([90, 4])
    results = []
    for executor in executors:
        executor.allocate(2)
        prefilled = executor.prefill(text, lengths)
        for row in range(2):
            executor.insert(prefilled, row, row)
    stored = prefilled.cache_lengths
    for new in ([3, 25], [25, 1], [WINDOW, WINDOW]):
        fed = generator.integers(2, 97, (STEPS, 2))
        for token in fed:
            results.append([executor.decode(token, lengths, stored).copy() for executor in executors])
            lengths, stored = lengths + 1, stored + 1
        block, counts = generator.integers(2, 97, (2, max(new))), np.array(new)
        one, several = (executor.extend(0, block, counts, lengths, stored) for executor in executors)
        np.testing.assert_array_equal(several.cache_lengths, one.cache_lengths)
        results.append([one.logits, several.logits])
        lengths, stored = lengths + counts, one.cache_lengths
    for one, several in results:
        np.testing.assert_allclose(several, one, atol=1e-5 * max(1.0, np.abs(one).max()))
    for name, buffer in executors[0].buffers.items():
        np.testing.assert_allclose(executors[1].buffers[name], buffer, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("form", ["auto", "int8"])
def test_a_rank_takes_the_forecast_memory(form, make_program, on_shared_ranks):
    """Its caches, and the most that its longest prompt may need, copies that nodes make included."""
    program = make_program("rocketkv", model=GEMMA_3, kv_cache=form)
    executor = on_shared_ranks(program, 2)
    executor.allocate(3)
    found = rank_memory(program.model, program.parameters, 3, 2, turns=False)["compressed"]
    assert 2 * 3 * found["cache_bytes_per_row"] == executor.state_bytes()
    local = shards(program.model, 2)[0].local
    own = replace(program, model=local, state=state_tensors(local, program.parameters, program.dtype))
    longest = program.parameters.max_input_len
    assert found["prefill_bytes"] == memory.prefill_bound(own, 1, longest, itemsize=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a config.json of Gemma 3's text model; builds from it take random weights."""
    path = tmp_path_factory.mktemp("models") / "gemma3"
    path.mkdir()
    changes = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }
    (path / "config.json").write_text(json.dumps({**TINY_MODEL, **changes}))
    return path


@pytest.fixture(scope="module")
def build(checkpoint, tmp_path_factory):
    """build(name, ...): the folder of an engine that was not verified."""

    def built(name, **settings):
        path = tmp_path_factory.mktemp("engines") / name
        chosen = {"policy": "rocketkv", "token_budget": 32, "weights": "fp32", "random_weights": 0}
        kvc_trt.build(str(checkpoint), output=path, verify=False, **LENGTHS, **{**chosen, **settings})
        return path

    return built


@pytest.fixture(scope="module")
def divided(build):
    """An engine for two ranks."""
    return build("two", tensor_parallel=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 2},
        pytest.param({"tensor_parallel": 4, "policy": "snapkv++", "kv_cache": "int8"}, marks=pytest.mark.exhaustive),
    ],
    ids=["two", "four, codes"],
)
def test_an_engine_passes_every_rung(settings, build):
    """Choices and codes of nodes are joined by head; within the budget, logits are the dense twin's to the bit."""
    report = verify(open_engine(build("verified", **settings)), RunOptions("torch"), steps=4, samples=2)
    assert report.passed, report.failures
    passed = {rung.name for rung in report.rungs if rung.status == "passed"}
    assert passed >= {"ops", "logits", "tokens", "dense twin", "activity"}
    assert report.description["backend"].endswith(f", {settings['tensor_parallel']} ranks")
    checks = {check.name for rung in report.rungs for check in rung.checks}
    assert {"KvcSlidingAttention values", "KvcExtendSlidingAttention values", "turns: max logit error"} <= checks


def test_a_conversation_on_ranks_is_that_of_one_process(divided, tmp_path):
    """Each question continues what was read and answered before it, from a stored context on."""
    first, *questions = [np.random.default_rng(seed).integers(3, 50, size).tolist() for seed, size in QUESTIONS]
    answers = {}
    for backend in ("torch", "onnxruntime"):
        with Engine.open(divided, backend=backend, threads=1) as engine:
            engine.save_context(engine.context(first), tmp_path / backend)
            kept = engine.load_context(tmp_path / backend)
            for question in questions:
                (answer,) = engine.generate([question], max_new_tokens=STEPS, ignore_eos=True, context=kept)
                kept = engine.context([*question, *answer.token_ids], context=kept)
                answers.setdefault(backend, []).extend(answer.token_ids)
    assert answers["torch"] == answers["onnxruntime"]
    assert len(set(answers["torch"])) > 4


def test_an_answer_names_the_ranks_and_what_has_no_kernel(divided, tmp_path, capsys):
    prompt = tmp_path / "prompt.json"
    prompt.write_text("[5, 9, 11]")
    given = ("--prompt-ids", str(prompt), "--max-new-tokens", "3", "--ignore-eos", "--json")
    assert command(["run", str(divided), *given]) == 0
    said = json.loads(capsys.readouterr().out)["kernels"]
    assert said.startswith("2 ranks; rocketkv: ")
    assert said.endswith("run as PyTorch operations, no kernel of ours")
