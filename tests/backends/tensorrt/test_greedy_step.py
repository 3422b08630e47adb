"""The executor over a fake CUDA and fake engines (`fake_cuda.py`): a step's copies, waits and answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.tensorrt import device
from kvc_trt.backends.tensorrt.lowering import PLUGINS
from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation
from kvc_trt.backends.tensorrt.lowering.passes import EXECUTABLE_PASSES
from kvc_trt.backends.tensorrt.running.executor import TensorRtExecutor
from kvc_trt.backends.tensorrt.running.loading import LoadedEngine, check_state
from kvc_trt.contexts import RowPacking
from kvc_trt.engine.program import Program
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.held import HeldFile
from kvc_trt.runtime import Request, Sampling, Session
from kvc_trt.runtime.context import Fingerprint
from kvc_trt.runtime.executor import NOT_FINITE, GreedyExecutor
from tests.backends.tensorrt.fake_cuda import FakeCuda, FakeEngine
from tests.graph.small_models import make_small_engine, prompts_of

ROWS = 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_small_engine(tmp_path_factory.mktemp("engine"), "rocketkv")


@pytest.fixture
def program(engine):
    return Program(
        engine.model, engine.parameters, engine.state, HeldFile(engine.directory / "weights.safetensors"),
        lambda: engine.prefill_model, lambda: engine.decode_model,
    )  # fmt: skip


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(device, "runtime", lambda: fake)
    return fake


def lowered(model, *, without: str | None = None):
    """Return the decode graph after the passes whose output ONNX Runtime can execute."""
    copy = type(model)()
    copy.CopyFrom(model)
    for step in EXECUTABLE_PASSES:
        if step.__name__ != without:
            step(copy, TensorRtInstallation((11, 4), PLUGINS))
    return copy


@pytest.fixture(scope="module")
def loaded(engine):
    """Both graphs as engines of a memory that each test brings."""
    prefill = FakeEngine(engine.prefill_model, engine.directory, [(1, 128), (ROWS, 256), (ROWS, 256)])
    decode = FakeEngine(lowered(engine.decode_model), engine.directory, [(1,), (ROWS,), (ROWS,)])
    strategy = SimpleNamespace(USER_MANAGED=0)
    tensorrt = SimpleNamespace(ExecutionContextAllocationStrategy=strategy)
    return LoadedEngine(prefill, decode, SimpleNamespace(tensorrt=tensorrt), 0)


@pytest.fixture
def executor(program, loaded, cuda):
    loaded.prefill.cuda = loaded.decode.cuda = cuda
    return TensorRtExecutor(program, loaded=loaded)


def requests(*, greedy: int = ROWS):
    prompts = prompts_of(250, 77, 3)
    return [
        Request(tuple(prompt.tolist()), max_new_tokens=6, sampling=Sampling(0.0 if row < greedy else 1.0, seed=row))
        for row, prompt in enumerate(prompts)
    ]


def test_an_engine_that_reports_no_alias_is_not_refused(executor, loaded, program, monkeypatch):
    """It is unknown if TensorRT reports aliases of plugins; the addresses are compared in any case."""
    monkeypatch.setattr(FakeEngine, "get_aliased_input_tensor", lambda engine, name: "")
    check_state(loaded, program.state)
    assert generated(executor)


def generated(executor, **options):
    return [output.token_ids for output in Session(executor, None, ROWS).generate(requests(**options))]


def test_the_greedy_step_returns_the_best_token(executor):
    assert isinstance(executor, GreedyExecutor)


@pytest.mark.parametrize("greedy", [ROWS, 1])
def test_a_session_answers_as_on_onnx_runtime(executor, program, greedy):
    """Greedy rows by the engine's best tokens, a mixed batch by its logits."""
    assert generated(executor, greedy=greedy) == generated(
        OnnxRuntimeExecutor(program, RunOptions(threads=1)), greedy=greedy
    )


def test_a_stored_row_goes_on_beside_rows_that_are_prefilled(executor, program):
    """Rows of a prefill wait in rows that are still free, where contexts are written."""
    packing = RowPacking(program, Fingerprint(*"01234", "small", "rocketkv"))
    session = Session(executor, None, ROWS, packing=packing)
    first, *others = (replace(request, keep_logits=True) for request in requests())
    (row,) = session.add([first])
    tokens = [event.token_id for _ in range(2) for event in session.step()]
    context = session.take(row)
    rest = [event.token_id for _ in range(4) for event in session.step()]
    assert session.rows == ()
    outputs = session.generate([replace(first, prompt_token_ids=(), context=context, max_new_tokens=4), *others])
    assert list(outputs[0].token_ids) == rest
    fresh = generated(executor)
    assert fresh[0] == (*tokens, *rest)
    assert [output.token_ids for output in outputs[1:]] == fresh[1:]


def test_a_greedy_step_copies_four_bytes_per_row_and_waits_once(executor, cuda):
    session = Session(executor, None, ROWS)
    session.add(requests())
    wait = ["launch", "wait", ("out", 4 * ROWS)]
    for expected in (["wait", ("out", 4 * ROWS), "record"], wait, wait):
        session.sample()
        cuda.log.clear()
        session.advance()
        assert cuda.log == expected


def test_logits_are_copied_behind_the_same_graph(executor, program, cuda):
    session = Session(executor, None, ROWS)
    session.add(requests(greedy=1))
    vocab = program.model.vocab_size
    copies = [("out", 4 * ROWS), ("out", 4 * ROWS * vocab)]
    for expected in (["wait", *copies, "record"], ["launch", "wait", *copies]):
        session.sample()
        cuda.log.clear()
        session.advance()
        assert cuda.log == expected


def test_greedy_step_and_logits_agree(executor, program):
    """Runs one step twice, its best tokens first; a step writes the same entries again."""
    session = Session(executor, None, ROWS)
    session.add(requests())
    fed = np.array([5, 9, 11]), np.array([250, 77, 3]), np.tile([[20], [20], [3]], (1, ROWS))[: len(program.capacities)]
    best = executor.decode_greedy(*fed)
    assert best.dtype == np.int64
    assert best.tolist() == executor.decode(*fed).argmax(-1).tolist()
    assert best.tolist() == executor.decode_greedy(*fed).tolist()


def test_non_finite_logits_are_reported_by_row(executor, program):
    session = Session(executor, None, ROWS)
    session.add(requests())
    executor.fill_rows({t.name: np.full(t.shape, np.nan, np.float32) for t in program.state if "v_cache" in t.name})
    lengths = np.full((len(program.capacities), ROWS), 3)
    fed = np.array([5, 9, 11]), np.array([9, 7, 5]), lengths
    assert executor.decode_greedy(*fed).tolist() == [NOT_FINITE] * ROWS
    session.step()
    with pytest.raises(InputError, match="row 0: the engine's logits are not finite after 251 tokens"):
        session.step()


def test_release_frees_all_device_memory(executor, cuda):
    generated(executor)
    executor.release()
    assert cuda.allocations == 0


def test_an_engine_that_tells_no_best_token_is_refused_when_it_is_loaded(engine, loaded):
    older = FakeEngine(lowered(engine.decode_model, without="add_best_token"), engine.directory, [])
    check_state(loaded, engine.state)
    with pytest.raises(UnsupportedEnvironment, match=r"config\.json: decode: best is missing$") as caught:
        check_state(replace(loaded, decode=older), engine.state)
    assert caught.value.hint == "build it again with --force"
