"""The executor on the reference's operators: the numbers of the reference decoder, the manners of any executor."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvc_trt import policies
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.torch import device as device_module
from kvc_trt.backends.torch.executor import TorchExecutor, kernel_device
from kvc_trt.backends.torch.model.weights import TorchWeights
from kvc_trt.cli.main import run as run_command
from kvc_trt.engine.program import twin_program
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.kernels import loading, ops, use_library
from kvc_trt.kernels.ops import kvc
from kvc_trt.models.config import FeedForward, ModelDescription, Yarn
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from tests.backends.onnxruntime.test_rows import assert_same_where_clear, margin, requests
from tests.backends.prompts import filled, padded, prompts
from tests.kernels.double import compile_double
from tests.small_model import SMALL as MODEL

FAMILIES = {
    "llama": MODEL,
    "biased and tied": replace(MODEL, qkv_bias=True, tie_word_embeddings=True),
    "yarn": replace(
        MODEL, rotary_scaling=Yarn(8.0, 64, 1.2), description=ModelDescription(feed_forward=FeedForward(bias=True))
    ),
    "output bias": replace(MODEL, qkv_bias=True, output_bias=True),
    "normed heads": replace(MODEL, architecture="Qwen3ForCausalLM", qk_norm=True, head_size=32),
    "one head each": replace(MODEL, num_key_value_heads=4),
}
POLICIES = ("full", "rocketkv", "rocketkv, a skipped layer", "snapkv++", "hybrid", "pyramidkv")
STEPS = 12


class Called:
    """`torch.ops.kvc`, and the names of the operators called."""

    def __init__(self):
        self.names = set()

    def __getattr__(self, name):
        def call(*arguments, **numbers):
            self.names.add(name)
            return getattr(kvc, name)(*arguments, **numbers)

        return call


@pytest.mark.parametrize(
    ("family", "precision", "rotates"),
    [("biased and tied", "fp32", True), ("normed heads", "fp32", False), ("llama", "fp16", False)],
)
def test_kernels_rotate_where_nothing_stands_between(family, precision, rotates, make_program, monkeypatch):
    """Neither a norm of heads nor, on a CPU, a cache of another type than the weights: they are float32 there."""
    monkeypatch.setattr(ops, "kvc", called := Called())
    executor = TorchExecutor(make_program("rocketkv, a skipped layer", precision, model=FAMILIES[family]), device="cpu")
    run(executor, batch_of(prompts()), 1)
    before = "rotated_" if rotates else ""
    steps = {f"{before}dense_attention", f"{before}hybrid_attention_without_selected"}
    assert {name for name in called.names if "attention" in name} == steps


def reference_logits(program, batch, tokens):
    """Return the reference decoder's logits for the same tokens, [N+1,B,vocab]."""
    method = policies.method(program.parameters)
    weights = EngineWeights(program.weight_file)
    decoder = ReferenceDecoder(program.model, weights, method=method, parameters=program.parameters)
    logits, cache = decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    found = [logits, *(decoder.decode(torch.from_numpy(row), cache) for row in tokens)]
    return torch.stack(found).numpy(), cache


def follows_the_reference(program, tolerance=1e-5):
    executor = TorchExecutor(program)
    batch = batch_of(prompts())
    found = run(executor, batch, STEPS)
    expected, cache = reference_logits(program, batch, found.tokens)
    scale = max(1.0, np.abs(expected).max())
    assert np.abs(found.logits - expected).max() / scale <= tolerance
    return executor, cache


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_and_caches_are_the_references(policy, make_program):
    executor, cache = follows_the_reference(make_program(policy))
    for index, layer in enumerate(cache.caches):
        np.testing.assert_allclose(executor.buffers[f"k_cache.{index}"], layer.keys.numpy(), atol=1e-5)
        np.testing.assert_allclose(executor.buffers[f"v_cache.{index}"], layer.values.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_family_follows_the_reference(family, make_program):
    follows_the_reference(make_program("rocketkv", model=FAMILIES[family]))


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_weights_are_dequantised_as_the_reference_does(precision, make_program):
    follows_the_reference(make_program("rocketkv", precision))


@pytest.mark.parametrize(
    ("policy", "precision", "tolerance"), [("rocketkv", "fp16", 2e-2), ("full", "fp16", 2e-2), ("full", "bf16", 5e-2)]
)
def test_a_16_bit_engine_keeps_16_bit_caches(policy, precision, tolerance, make_program):
    """Leaves out RocketKV in bfloat16: the reference's caches are float32, and such coarse rounding reads other tokens.

    With this budget, float16 reads the same ones."""
    executor, _ = follows_the_reference(make_program(policy, precision, token_budget=48), tolerance)
    name = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    assert {buffer.dtype.name for buffer in executor.buffers.values()} == {name}
    assert executor.weights.embedding.dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_weights_in_the_caches_type_give_the_reference_to_that_types_rounding(precision, make_program):
    """Computes in the 16-bit type that a GPU uses, here by the CPU's kernels for it."""
    program = make_program("full", precision)
    batch = batch_of(prompts())
    source = EngineWeights(program.weight_file)
    dtype = getattr(torch, program.dtype)
    weights = TorchWeights.read(program.model, source, torch.device("cpu"), dtype)
    found = run(TorchExecutor(program, weights=weights), batch, STEPS)
    expected, _ = reference_logits(program, batch, found.tokens)
    assert np.abs(found.logits - expected).max() / np.abs(expected).max() <= (1e-2 if precision == "fp16" else 6e-2)


@pytest.mark.parametrize(("device", "message"), [("cuda", "there is none"), ("gpu", "expected one of auto, cpu, cuda")])
def test_a_device_that_cannot_be_is_refused(device, message, rocketkv):
    with pytest.raises((UnsupportedEnvironment, InputError), match=message):
        TorchExecutor(rocketkv, device=device)


def test_the_cpu_is_taken_when_asked_for_although_there_is_a_cuda_library(rocketkv, tmp_path, monkeypatch):
    monkeypatch.setenv(loading.VARIABLE, str(compile_double(tmp_path, executor="cuda")))
    executor = TorchExecutor(rocketkv, device="cpu")
    executor.allocate(3)
    assert np.isfinite(executor.decode(*filled(executor))).all()


def test_an_old_pytorch_is_refused_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv(loading.VARIABLE, str(compile_double(tmp_path, executor="cuda")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    with pytest.raises(UnsupportedEnvironment, match=r"needs PyTorch 2\.8 or newer on a GPU, found 2\.7\.1"):
        kernel_device()


def test_an_executor_on_a_cpu_warns_once_that_it_is_slow(rocketkv, caplog):
    device_module.warn_once.cache_clear()
    for _ in range(2):
        TorchExecutor(rocketkv)
    assert caplog.text.count("this is slow") == 1


@pytest.fixture(scope="module")
def rocketkv(make_program):
    return make_program("rocketkv, a skipped layer")


@pytest.fixture
def executor(rocketkv):
    executor = TorchExecutor(rocketkv)
    executor.allocate(4)
    return executor


def test_limits_and_bytes_follow_from_the_state_list(executor, rocketkv):
    assert executor.limits.capacities == (272, rocketkv.parameters.capacity, rocketkv.parameters.capacity)
    assert executor.state_bytes() == 4 * sum(tensor.bytes_per_row() for tensor in rocketkv.state)
    bounds = next(tensor for tensor in rocketkv.state if tensor.name == "bounds.1")
    assert (executor.buffers["bounds.1"] == np.float32(bounds.fill)).all()


def test_prefill_gives_each_rows_state_and_lengths(executor, rocketkv):
    ids, lengths = padded(prompts())
    prefilled = executor.prefill(ids, lengths)
    kept = np.array([rocketkv.parameters.kept_of(n) for n in lengths.tolist()])
    assert prefilled.cache_lengths.tolist() == [lengths.tolist(), kept.tolist(), kept.tolist()]
    shapes = {name: tuple(tensor.shape) for name, tensor in prefilled.state.items()}
    assert shapes == {tensor.name: (3, *tensor.shape) for tensor in rocketkv.state}
    for layer, stored in ((0, lengths), (1, kept)):
        for row, length in enumerate(stored):
            written = prefilled.state[f"k_cache.{layer}"][row].abs().sum(dim=-1) > 0
            assert bool(written[:, :length].all())
            assert not written[:, length:].any(), "padding was stored"


def test_a_step_writes_one_slot_per_row_and_cache_in_place(executor):
    tokens, positions, lengths = filled(executor)
    buffers = executor.buffers
    before = {name: buffer.copy() for name, buffer in buffers.items()}
    executor.decode(tokens, positions, lengths)
    assert executor.runs == 1
    for name, buffer in buffers.items():
        assert buffer.ctypes.data == executor.buffers[name].ctypes.data, "a step moved its state"
        if "cache" in name:
            changed = (buffer != before[name]).any(axis=-1)
            expected = np.zeros(changed.shape, bool)
            expected[range(3), :, lengths[int(name.split(".")[1])]] = True
            np.testing.assert_array_equal(changed, expected, err_msg=name)
        else:
            assert not (buffer != before[name])[3:].any()


def test_a_moved_row_answers_as_the_one_it_was(executor):
    tokens, positions, lengths = filled(executor)
    executor.move(0, 2)
    twice = [0, 1, 0]
    logits = executor.decode(tokens[twice], positions[twice], lengths[:, twice])
    np.testing.assert_allclose(logits[2], logits[0], atol=1e-5)
    assert np.abs(logits[1] - logits[0]).max() > 1e-2


def alone(program, request):
    executor = TorchExecutor(program)
    margins = []
    decode, prefill = executor.decode, executor.prefill

    def recording(*arguments):
        logits = decode(*arguments)
        margins.append(margin(logits[0]))
        return logits

    def recording_prefill(*arguments):
        prefilled = prefill(*arguments)
        margins.append(margin(prefilled.logits[0]))
        return prefilled

    executor.decode, executor.prefill = recording, recording_prefill
    executor.decode_greedy = lambda *arguments: recording(*arguments).argmax(-1)
    [output] = Session(executor, None, 1).generate([request])
    return output, margins


def test_rows_come_and_go_without_a_trace(rocketkv):
    """Seven requests of different lengths through three rows: every answer as if it had been alone."""
    outputs = Session(TorchExecutor(rocketkv), None, 3).generate(requests())
    for output, request in zip(outputs, requests(), strict=True):
        assert_same_where_clear(output, *alone(rocketkv, request))


def test_within_the_budget_it_is_the_dense_twin_bit_for_bit(rocketkv):
    batch = batch_of(prompts((20, 1, 9)))
    ours = run(TorchExecutor(rocketkv), batch, 10)
    dense = run(TorchExecutor(twin_program(rocketkv)), batch, 10, tokens=ours.tokens)
    assert (ours.logits == dense.logits).all()


def test_two_executors_can_share_weights(rocketkv):
    one = TorchExecutor(rocketkv)
    other = TorchExecutor(twin_program(rocketkv), weights=one.weights)
    assert other.decoder._weights is one.decoder._weights


def test_inputs_and_outputs_of_operators_can_be_exposed(rocketkv):
    names = ["q_window.1", "keys.1", "indices.1", "query.2", "attended.2", "selected.2"]
    executor = TorchExecutor(rocketkv, expose=names)
    executor.allocate(3)
    step = filled(executor)
    assert executor.exposed("q_window.1").shape == (3, 4, rocketkv.parameters.window, 16)
    assert executor.exposed("keys.1").shape == (3, 2, 200, 16)
    kept = executor.exposed("indices.1")
    assert (kept >= 0).sum(axis=-1)[:, 0].tolist() == [rocketkv.parameters.kept_of(200), 1, 31]
    executor.decode(*step)
    assert executor.exposed("selected.2").shape == (3, 2, rocketkv.parameters.selected_width)
    assert executor.exposed("attended.2").shape == executor.exposed("query.2").shape == (3, 4, 16)
    with pytest.raises(ValueError, match=r"logits\.0 cannot be exposed"):
        TorchExecutor(rocketkv, expose=["logits.0"])


def test_one_run_per_step_goes_through_the_kernels_of_the_library(rocketkv, tmp_path):
    """With a double in place of the library every value is garbage, but the calls can be counted."""
    from tests.kernels.double import Calls

    with use_library(compile_double(tmp_path)) as double:
        calls = Calls(double.path)
        executor = TorchExecutor(rocketkv)
        executor.allocate(2)
        executor.prefill(*padded(prompts((50, 3))))
        assert calls.count.value == 2, "a compaction per compressed layer"
        two = np.zeros(2, np.int64)
        executor.decode(two, two, np.zeros((3, 2), np.int64))
        assert calls.count.value == 5, "one attention per layer"


def test_a_cuda_library_needs_a_gpu(rocketkv, tmp_path, monkeypatch):
    monkeypatch.setenv(loading.VARIABLE, str(compile_double(tmp_path, executor="cuda")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedEnvironment, match="runs on a GPU, and PyTorch finds none") as refused:
        TorchExecutor(rocketkv)
    assert f"PyTorch {torch.__version__} is built for" in refused.value.message
    assert "kvc-trt doctor" in refused.value.hint


def test_caches_that_do_not_fit_say_how_much_they_need(rocketkv):
    with pytest.raises(UnsupportedEnvironment, match=r"of 1000000000 rows need \d+\.\d TiB"):
        TorchExecutor(rocketkv).allocate(10**9)


@pytest.mark.parametrize(("method", "what"), [("prefill", "prefill of 1 x 5 tokens"), ("decode", "a step of 1 rows")])
def test_running_out_of_memory_is_reported_in_one_line(method, what, rocketkv, monkeypatch):
    executor = TorchExecutor(rocketkv)
    executor.allocate(1)

    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand advice")

    monkeypatch.setattr(executor.decoder, method, exhausted)
    one = np.ones(1, np.int64)
    asked = padded(prompts((5,))) if method == "prefill" else (one, one, np.ones((3, 1), np.int64))
    with pytest.raises(UnsupportedEnvironment, match=f"{what} ran out of memory, .* are free") as refused:
        getattr(executor, method)(*asked)
    assert "and advice" not in refused.value.message


def test_a_torch_session_answers_as_one_on_onnx_runtime(engine):
    from kvc_trt.backends.opening import open_session

    session = open_session(engine.path, RunOptions("torch"), max_batch_size=2)
    onnx = open_session(engine.path, max_batch_size=2)
    asked = [Request([5, 9, 11] * 60, 6, ignore_eos=True), Request([7], 4, ignore_eos=True)]
    assert [o.token_ids for o in session.generate(asked)] == [o.token_ids for o in onnx.generate(asked)]
    with pytest.raises(InputError, match="does not run on backend triton"):
        open_session(engine.path, RunOptions("triton"))


def test_the_command_line_runs_an_engine_in_pytorch(engine, tmp_path, capsys):
    """The answer equals the one that the graphs give in ONNX Runtime."""
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([5, 9, 11] * 60))
    answers = []
    for backend in ([], ["--backend", "torch"]):
        arguments = ["run", str(engine.path), "--prompt-ids", str(prompt), "--max-new-tokens", "4", "--ignore-eos"]
        assert run_command([*arguments, *backend, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 4
