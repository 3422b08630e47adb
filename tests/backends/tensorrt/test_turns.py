"""Turns: the lowered extend graph, and the executor that runs its plan.

The lowered graph in ONNX Runtime against the original graph, in NVIDIA's parser and builder, and over the fakes of
`fake_cuda.py`. Nothing here runs on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from onnx import ModelProto

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.registry import backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.single_operator import single_operators
from kvc_trt.backends.tensorrt import device
from kvc_trt.backends.tensorrt.harness import for_shapes
from kvc_trt.backends.tensorrt.lowering import PLUGINS, expected_aliases, expected_plugins, lower, passes
from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation
from kvc_trt.backends.tensorrt.lowering.passes import EXECUTABLE_PASSES
from kvc_trt.backends.tensorrt.lowering.state import hand_on_state
from kvc_trt.backends.tensorrt.running.executor import TensorRtExecutor
from kvc_trt.backends.tensorrt.running.loading import LoadedEngine, check_state
from kvc_trt.engine.program import Program
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.held import HeldFile
from kvc_trt.kernels.stored_parts import parts_of
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.runtime import Request, Session
from tests.backends.tensorrt.fake_cuda import FakeCuda, FakeEngine
from tests.backends.tensorrt.weightless import weightless_extend, weights_as_inputs
from tests.graph.small_models import LLAMA, make_small_engine, open_session, prompts_of, resolve
from tests.rounding import assert_close

KEEPING = ("full", "hybrid", "hybrid, fp8", "quest-matched", "full, kv_cache=int4", "hybrid, kv_cache=fp8")
COMPACTING = (
    "rocketkv", "rocketkv, fp8", "rocketkv-v1", "rocketkv-v2", "rocketkv, kv_cache=int8", "rocketkv, kv_cache=k8v4"
)  # fmt: skip
WITHOUT_PAGES = ("snapkv++", "snapkv-gqa", "pyramidkv")
"""Lowered and parsed, but no plan is made of them."""
POLICIES = (*KEEPING, *COMPACTING)
ALL = (*POLICIES, *WITHOUT_PAGES)
EXACT = tuple(policy for policy in ALL if "kv_cache" not in policy)
AT_HAND = TensorRtInstallation((11, 4), PLUGINS)
ROWS, LONGEST = 3, 128


def parameters_of(policy: str):
    """Room for the turns where everything stays; elsewhere budgets that a turn exceeds."""
    name, *more = policy.split(", ")
    own = {}
    for option in more:
        key, _, value = option.partition("=")
        own |= {key: value} if value else {"fp8_bounds": True}
    if policy in KEEPING:
        return resolve(name, max_input_len=248, max_output_len=200, **own)
    budget = {"pyramidkv": 64}.get(name, 52)
    return resolve(name, max_input_len=450, max_output_len=8, token_budget=budget, **own)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    made = {}

    def engine(policy):
        if policy not in made:
            made[policy] = make_small_engine(tmp_path_factory.mktemp("engine"), parameters_of(policy), turns=True)
        return made[policy]

    return engine


def executable(model: ModelProto) -> ModelProto:
    """The graph after the passes whose output ONNX Runtime can execute; operator bodies stand in for the plugins."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for step in EXECUTABLE_PASSES:
        step(copy, AT_HAND)
    return copy


def lowered(policy: str, precision: str = "bf16", **changes) -> ModelProto:
    model = weightless_extend(LLAMA, parameters_of(policy), precision)
    return lower(weights_as_inputs(model), **{"tensorrt": (11, 4), "plugins": PLUGINS, **changes})


# --- the graph ---


def feeds_of(engine, lengths=(40, 1, 9), stored=(40, 3, 0)) -> dict[str, np.ndarray]:
    """Return a ragged turn onto caches that hold random tokens, and other tokens in their free slots."""
    generator = np.random.default_rng(0)
    block = max(lengths)
    feeds = {
        "input_ids": generator.integers(2, LLAMA.vocab_size, (len(lengths), block)),
        "lengths": np.array(lengths),
        "positions": np.array(stored) + 5,
        "cache_lengths": np.tile(np.array(stored), (len({tensor.cache for tensor in engine.state}), 1)),
    }
    for tensor in engine.state:
        shape = (len(lengths), *tensor.shape)
        if tensor.dtype == "int32":
            feeds[tensor.name] = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape).copy()
        elif tensor.dtype == "int8" and "_scale" in tensor.name:  # exponents near 1
            feeds[tensor.name] = generator.integers(120, 128, shape, np.int8)
        elif tensor.dtype == "int8":
            feeds[tensor.name] = generator.integers(0, 64, shape, np.int8)
        else:
            numbers = generator.standard_normal(shape)
            feeds[tensor.name] = (numbers / 16 if tensor.dtype == "float16" else numbers).astype(tensor.dtype)
    return feeds


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(40, 1, 9), (1, 1, 1), (7, 200, 64)], ids=str)
@pytest.mark.parametrize("policy", EXACT)
def test_a_lowered_turn_keeps_the_same_tokens_and_answers_the_same(engine_of, policy, lengths):
    """Choices, positions and lengths are equal; numbers are equal up to the rounding of another attention."""
    engine = engine_of(policy)
    feeds = feeds_of(engine, lengths)
    results = []
    for model in (engine.extend_model, executable(engine.extend_model)):
        session = open_session(model, engine.directory)
        names = [output.name for output in session.get_outputs()]
        results.append(dict(zip(names, session.run(names, feeds), strict=True)))
    before, after = results
    assert before.keys() == after.keys()
    for name, expected in before.items():
        assert_close(after[name], expected, 2e-5, name)


@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "k8v4"])
def test_lowered_attention_reads_codes_as_its_body_does(form, tmp_path):
    """Alone: in a whole model a rounding beside an edge changes a code of a later layer, or a whole vector's scale."""
    model = weightless_extend(LLAMA, parameters_of(f"full, kv_cache={form}"), "fp32")
    single = next(one for one in single_operators(model, "float32") if one.name == "KvcExtendAttention")
    generator, heads, size = np.random.default_rng(0), LLAMA.num_key_value_heads, LLAMA.head_size
    query = generator.standard_normal((2, LLAMA.num_attention_heads, 7, size)).astype(np.float32)
    tables = [torch.from_numpy(generator.standard_normal((2, heads, 40, size)).astype(np.float32)) for _ in range(2)]
    kinds = CACHE_FORMATS[form].keys, CACHE_FORMATS[form].values
    parts = [part.numpy() for table, kind in zip(tables, kinds, strict=True) for part in parts_of(table, kind)]
    given = dict(zip(single.inputs, [query, *parts, np.array([33, 5])], strict=True))
    shaped = for_shapes(single.model, {name: value.shape for name, value in given.items()})
    (expected,), (found,) = (open_session(one, tmp_path).run(None, given) for one in (shaped, executable(shaped)))
    assert "KvcExtendAttention" not in {node.op_type for node in executable(shaped).graph.node}
    assert_close(found, expected, 2e-6, form)


@pytest.mark.parametrize("policy", ALL)
def test_every_operator_of_ours_is_a_plugin_and_every_state_tensor_updated_in_place(policy):
    model = lowered(policy)
    assert not model.functions
    assert not {"Loop", "If", "Scan"} & {node.op_type for node in model.graph.node}
    in_place = {}
    for node in model.graph.node:
        if node.domain == KVC_DOMAIN:
            operator = OPERATORS[node.op_type].for_numbers({a.name: a.i for a in node.attribute})
            assert operator.kernel is not None
            names = [tensor.name for tensor in operator.inputs]
            for tensor, output in zip(operator.outputs, node.output, strict=True):
                if tensor.alias is not None:
                    shared = node.input[names.index(tensor.alias)]
                    in_place[output] = in_place.get(shared, shared)
    aliases = expected_aliases(model)
    assert len(aliases) == sum(value.name.count("_out.") for value in model.graph.output)
    assert {output: state for output, state in in_place.items() if "_handed_on." not in output} == aliases


def test_a_turn_graph_has_the_plugins_of_its_policy():
    layers = LLAMA.num_hidden_layers
    assert expected_plugins(lowered("full")) == {"KvcAppendBlock": layers}
    assert expected_plugins(lowered("hybrid")) == {"KvcAppendBlock": layers, "KvcRaiseBounds": layers}
    compacted = dict.fromkeys(("KvcJoinBlock", "KvcCompactTurn", "KvcReplaceCache"), layers)
    assert expected_plugins(lowered("snapkv++")) == compacted
    with_pages = {**compacted, "KvcReplaceBounds": layers}
    assert expected_plugins(lowered("rocketkv")) == with_pages
    assert expected_plugins(lowered("rocketkv, kv_cache=int8")) == {**with_pages, "KvcAppendBlock": layers}


@pytest.mark.parametrize(("policy", "fp8_bounds"), [("rocketkv", 0), ("rocketkv, fp8", 1)])
def test_nodes_that_overwrite_bounds_say_if_they_are_fp8(policy, fp8_bounds):
    nodes = [node for node in lowered(policy).graph.node if node.op_type == "KvcReplaceBounds"]
    assert [{a.name: a.i for a in node.attribute}["fp8_bounds"] for node in nodes] == [fp8_bounds] * len(nodes)
    assert nodes


@pytest.mark.parametrize("policy", ALL)
def test_nothing_reads_a_state_tensor_once_it_may_be_overwritten(policy):
    """A node that overwrites a buffer runs after every reader, except its own plugin and the plugin's inputs."""
    model = lowered(policy)
    producers = {name: node for node in model.graph.node for name in node.output}

    def needed(node, found):
        for name in node.input:
            if name in producers and producers[name].name not in found:
                found.add(producers[name].name)
                needed(producers[name], found)
        return found

    for output, state in expected_aliases(model).items():
        writer = producers[output]
        readers = {node.name for node in model.graph.node if state in node.input}
        assert readers - {writer.name} <= needed(writer, set()), state


def test_a_plugin_of_a_turn_that_is_missing_is_named():
    with pytest.raises(UnsupportedEnvironment, match=r"KvcReplaceCache .*not in the registry"):
        lowered("rocketkv", plugins=PLUGINS - {"KvcReplaceCache"})


@pytest.mark.parametrize("policy", ["h2o", "streaming-llm", "sparq", "rocketkv-mt"])
def test_a_policy_without_kernels_is_refused_by_its_operator(policy):
    model = weightless_extend(LLAMA, resolve(policy, window=8) if policy == "rocketkv-mt" else resolve(policy), "bf16")
    if policy == "rocketkv-mt":  # its turns have kernels, its steps have two caches
        assert "KvcCompactTurn" in {node.op_type for node in model.graph.node}
        return
    with pytest.raises(InputError, match="no plugin"):
        lower(model, tensorrt=(11, 4), plugins=PLUGINS)


# --- NVIDIA's parser and builder ---


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("precision", "policies"),
    [
        ("bf16", POLICIES),
        pytest.param("fp16", ("full", "hybrid", "rocketkv"), marks=pytest.mark.slow),
        pytest.param("fp32", ("full", "hybrid", "rocketkv"), marks=pytest.mark.slow),
    ],
)
def test_nvidias_parser_takes_the_graph_and_its_builder_makes_a_plan(ask_parser, precision, policies):
    graphs = [lowered(policy, precision) for policy in policies]
    for policy, graph, answer in zip(policies, graphs, ask_parser(*graphs, plan=True), strict=True):
        assert answer["parsed"], (policy, answer["errors"])
        assert answer["problem"] is None
        assert answer["plugins"] == expected_plugins(graph)
        assert answer["aliases"] == expected_aliases(graph)
        # a mask of its own in every layer, and only fp32 may be taken apart
        assert answer["attention"] == [["NONE", precision == "fp32", True]] * LLAMA.num_hidden_layers
        assert answer["plan_bytes"] > 0, (policy, answer["log"])


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_builder_makes_no_turn_plan_for_caches_without_pages(ask_parser):
    """The parser takes the graph; the builder fails by an assertion of its own."""
    (answer,) = ask_parser(lowered("snapkv++"), plan=True)
    assert (answer["parsed"], answer["problem"]) == (True, None)
    assert answer["plan_bytes"] == 0
    assert any("hasValidProfileData() failed" in error for error in answer["log"]), answer["log"]


@pytest.mark.parametrize("policy", ALL)
def test_a_policy_takes_turns_or_the_reason_is_known(policy):
    reason = backend("tensorrt").no_turns(parameters_of(policy))
    assert (reason is None) == (policy in POLICIES)
    assert reason is None or "a cache without pages" in reason


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_builder_makes_no_plan_unless_a_cache_of_codes_is_handed_on(ask_parser, monkeypatch):
    """The parser takes the graph without it; the builder makes no plan."""
    monkeypatch.setattr(passes, "PASSES", tuple(step for step in passes.PASSES if step is not hand_on_state))
    (answer,) = ask_parser(lowered("rocketkv, kv_cache=int8"), plan=True)
    assert (answer["parsed"], answer["problem"]) == (True, None)
    assert answer["plan_bytes"] == 0
    assert any("cannot be quantized by k_cache" in error for error in answer["log"]), answer["log"]


@pytest.mark.slow
@pytest.mark.tensorrt
def test_without_their_plugins_state_would_be_copied(ask_parser):
    """The parser knows no alias but a plugin's."""
    (answer,) = ask_parser(lowered("rocketkv"), damage="alias")
    assert answer["parsed"]
    assert answer["aliases"].keys() < expected_aliases(lowered("rocketkv")).keys()


# --- the executor, over fakes ---


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(device, "runtime", lambda: fake)
    return fake


@pytest.fixture
def executor_of(engine_of, cuda):
    """executor_of(policy) -> an executor over fakes, and the program that it runs."""

    def make(policy, longest=LONGEST):
        engine = engine_of(policy)
        program = Program(
            engine.model, engine.parameters, engine.state, HeldFile(engine.directory / "weights.safetensors"),
            lambda: engine.prefill_model, lambda: engine.decode_model, lambda: engine.extend_model,
        )  # fmt: skip
        ends = {"prefill": [(1, 128), (ROWS, 256), (ROWS, 512)], "decode": [(1,), (ROWS,), (ROWS,)]}
        ends["extend"] = [(1, 1), (1, longest), (1, longest)]
        models = {"prefill": engine.prefill_model, "decode": engine.decode_model, "extend": engine.extend_model}
        graphs = {name: executable(model) for name, model in models.items()}
        if "kv_cache" in policy:  # roundings of another attention would change codes
            graphs["extend"] = engine.extend_model
        engines = {name: FakeEngine(graph, engine.directory, ends[name]) for name, graph in graphs.items()}
        for fake in engines.values():
            fake.cuda = cuda
        tensorrt = SimpleNamespace(ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0))
        loaded = LoadedEngine(**engines, toolkit=SimpleNamespace(tensorrt=tensorrt), plan_bytes=0)
        return TensorRtExecutor(program, loaded=loaded), program

    return make


def conversation(executor, turns=((30, 5), (1, 40))):
    """Return the tokens of two rows of three that answer, are asked again, and answer."""
    session = Session(executor, None, ROWS)
    requests = [Request(tuple(prompt.tolist()), max_new_tokens=3, stay=True) for prompt in prompts_of(120, 40, 9)]
    rows = session.add(requests)
    answers = []
    for number, lengths in enumerate(turns):
        answers += [(event.row, event.token_id) for _ in range(3) for event in session.step()]
        for row, block in zip(rows, prompts_of(*lengths, seed=number), strict=False):
            session.turn(row, block.tolist(), max_new_tokens=3)
    return [*answers, *((event.row, event.token_id) for _ in range(3) for event in session.step())]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "hybrid", "rocketkv", "hybrid, kv_cache=fp8", "rocketkv, kv_cache=k8v4"])
def test_a_conversation_is_that_of_onnx_runtime(executor_of, policy):
    """Tensors whose rows are aligned run where they are; the positions of slots are copied."""
    executor, program = executor_of(policy)
    aligned = {tensor.bytes_per_row() % 512 == 0 for tensor in program.state}
    assert aligned == ({True} if policy in ("full", "hybrid") else {True, False})
    expected = conversation(OnnxRuntimeExecutor(program, RunOptions(threads=1)))
    assert len(expected) > 20
    assert conversation(executor) == expected


def test_a_turn_leaves_the_other_rows_alone(executor_of):
    executor, _ = executor_of("rocketkv")
    session = Session(executor, None, ROWS)
    rows = session.add([Request(tuple(p.tolist()), max_new_tokens=8) for p in prompts_of(60, 40, 9)])
    before = [executor.read_row(row) for row in range(ROWS)]
    session.turn(rows[1], [5, 6, 7])
    for row in (0, 2):
        for name, value in executor.read_row(row).items():
            np.testing.assert_array_equal(value, before[row][name], err_msg=name)
    assert any(not np.array_equal(value, before[1][name]) for name, value in executor.read_row(1).items())


def test_a_turn_longer_than_a_run_is_split_where_every_token_stays(executor_of):
    (whole, _), (cut, _) = (executor_of("hybrid", longest) for longest in (LONGEST, 16))
    assert conversation(cut) == conversation(whole)


def test_a_turn_longer_than_a_run_is_refused_where_tokens_compete(executor_of):
    executor, _ = executor_of("rocketkv", 16)
    session = Session(executor, None, ROWS)
    (row,) = session.add([Request((5, 6, 7), max_new_tokens=4)])
    with pytest.raises(
        InputError, match="a turn of 17 tokens: expected at most 16 where stored and new tokens"
    ) as caught:
        session.turn(row, range(2, 19))
    assert caught.value.hint == "take it in parts"
    session.turn(row, range(2, 18))


def test_release_after_turns_frees_all_device_memory(executor_of, cuda):
    executor, _ = executor_of("rocketkv")
    conversation(executor)
    executor.release()
    assert cuda.allocations == 0


def test_an_engine_without_the_plan_takes_no_turns(executor_of):
    executor, program = executor_of("rocketkv")
    loaded = replace(executor.load(), extend=None)
    other = TensorRtExecutor(program, loaded=loaded)
    other.allocate(1)
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match="no extend plan"):
        other.extend(0, one[None], one, one, np.ones((len(program.capacities), 1), np.int64))


def test_the_state_of_all_three_plans_is_checked_when_they_are_loaded(executor_of):
    executor, program = executor_of("rocketkv")
    loaded = executor.load()
    check_state(loaded, program.state)
    renamed = [replace(tensor, name=f"x{tensor.name}") if not tensor.in_step else tensor for tensor in program.state]
    with pytest.raises(UnsupportedEnvironment, match=r"prefill: xslot_positions\.0 is missing"):
        check_state(loaded, renamed)
    in_step = tuple(tensor for tensor in program.state if tensor.in_step)
    with pytest.raises(UnsupportedEnvironment, match=r"shares the wrong buffer: slot_positions_out\.0"):
        check_state(loaded, in_step)
