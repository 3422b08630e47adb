"""An engine's graphs tensor by tensor, compared by Polygraphy: where do two executors first differ?

The ladder says whether an engine is right; this says where a wrong one goes wrong. ONNX Runtime runs the graphs of the
engine directory, and every other executor that runs here is compared with it on the same inputs: one prompt, then
decode steps that each start from the caches that ONNX Runtime left. Tensors are compared in the graph's order, and the
first that differs beyond the bar is named. With a directory, inputs and outputs are written as Polygraphy's own files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.harness import Harness, StoredBlock, Watched
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.registry import backends, runners
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.errors import InputError, KvcError, UnsupportedEnvironment
from kvc_trt.files.atomic import files_together
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.kernels import use_library
from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.runtime.session.batch import Batch, batch_of
from kvc_trt.verify.checks import Rung
from kvc_trt.verify.plan import make_plan
from kvc_trt.verify.questions.prompts import random_prompts
from kvc_trt.verify.report import Report
from kvc_trt.verify.rungs.tensor_differences import Judge
from kvc_trt.verify.thresholds import thresholds_for

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

Array = NDArray[Any]
Values = Mapping[str, Array]

BASE = "onnxruntime"
"""The executor that all others are compared with: it alone shows every tensor of a graph."""
STEPS = 4
"""Decode steps compared."""
STATISTICS = ("log_output_stats", "log_compared_output_stats")
"""Polygraphy's functions that describe tensors in its log; which of them there are depends on its version."""
GRAPHS = ("prefill", "decode")
TOLERANCES = "tolerances.py"
_TOLERANCES_SCRIPT = '''"""The bars of kvc-trt verify --level tensors, for polygraphy run --compare-func-script."""

from polygraphy.comparator import SimpleCompareFunc

compare_outputs = SimpleCompareFunc(
    atol={bars},
    rtol=0.0,
    check_error_stat="max",
    infinities_compare_equal=True,
    find_output_func=lambda name, index, found: [name] if name in found else None,
)
'''


def require_polygraphy() -> None:
    """UnsupportedEnvironment where Polygraphy is missing."""
    if importlib.util.find_spec("polygraphy") is None:
        raise UnsupportedEnvironment(
            "--level tensors compares with NVIDIA Polygraphy, which is not installed",
            hint="pip install 'kvc-trt[polygraphy]'",
        )


def check_settings(**settings: object) -> None:
    """InputError for a setting that only other levels take."""
    for name, value in settings.items():
        if value is not None:
            raise InputError(f"--{name} does not go with --level tensors")


def verify_tensors(
    engine: EngineDirectory,
    *,
    backend: str,
    kernels: Path | None = None,
    directory: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Compare the engine's graphs with their rewritten form and with other executors, tensor by tensor.

    `backend` runs the engine; if it is ONNX Runtime, all other backends that can run it are compared. `directory`
    receives Polygraphy's files. A difference is in the report, not raised.
    """
    require_polygraphy()
    others = [backend] if backend != BASE else [name for name in runners(engine.backend) if name != BASE]
    if kernels is not None and not any(backends()[name].calls_kernels for name in others):
        raise InputError(f"--kernels {kernels}: no executor that is compared calls it", hint="--backend torch")
    room = engine.parameters.max_output_len
    if steps is not None and not 1 <= steps <= room:
        raise InputError(f"--steps is {steps}: expected 1 to {room}, the engine's new tokens")
    started = time.monotonic()
    comparison = _Comparison(engine, seed, steps or min(STEPS, room), directory, progress or NullProgress())
    report = comparison.report
    libraries = contextlib.nullcontext() if kernels is None else use_library(kernels)
    with libraries, _without_a_log(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # Polygraphy's differences of empty slots
        for other in others:
            comparison.add(other)
        for graph in GRAPHS:
            comparison.compare(graph)
    if directory is not None:
        report.next_commands += [_next_command(report, graph, directory) for graph in GRAPHS]
    report.seconds = time.monotonic() - started
    return report


@contextlib.contextmanager
def _without_a_log() -> Iterator[None]:
    """Let Polygraphy log nothing during the block, and compute no statistics of tensors for its log.

    It computes them even if it logs nothing, which takes longer than running and comparing the graphs.
    """
    from polygraphy.comparator import util
    from polygraphy.logger import G_LOGGER

    statistics = {name: getattr(util, name) for name in STATISTICS if hasattr(util, name)}
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        for name in statistics:
            setattr(util, name, lambda *given, **options: None)
        try:
            yield
        finally:
            for name, function in statistics.items():
                setattr(util, name, function)


def _next_command(report: Report, graph: str, directory: Path) -> str:
    """Polygraphy's command that compares the graph with an executor's file: one that differed, or the last."""
    rungs = [rung for rung in report.rungs if rung.name.startswith(graph)]
    chosen = next((rung for rung in rungs if rung.status == "failed"), rungs[-1])
    files = directory / graph
    paths = (
        Path(report.engine) / f"{graph}.onnx",
        files / "inputs.json",
        files / f"{_other(chosen)}.json",
        files / TOLERANCES,
    )
    model, inputs, outputs, tolerances = (shlex.quote(str(path)) for path in paths)
    return (
        f"polygraphy run {model} --onnxrt --onnx-outputs mark all --load-inputs {inputs} --load-outputs {outputs} "
        f"--compare-func-script {tolerances}"
    )


def _other(rung: Rung) -> str:
    """The executor that a rung compares with ONNX Runtime."""
    return rung.name.rpartition(" | ")[2]


@dataclass
class _Comparison:
    """Everything that the comparisons of one engine share."""

    engine: EngineDirectory
    seed: int
    steps: int
    directory: Path | None
    progress: Progress
    harnesses: dict[str, Harness] = field(default_factory=dict)
    prefilled: Values = field(default_factory=dict)
    """The outputs of ONNX Runtime's prefill, where decoding starts."""

    def __post_init__(self) -> None:
        engine = self.engine
        weights = GraphWeights(engine.weight_file).precision
        self.bar = thresholds_for(weights).logits_max_error
        self.batch = self._prompt()
        self.base = harness_for(engine, RunOptions(BASE))
        self.report = Report(
            engine=str(engine.path),
            level="tensors",
            description={
                "model": engine.build.model,
                "policy": engine.parameters.policy,
                "weights": weights,
                "prompt_tokens": int(self.batch.prompt_lengths[0]),
                "steps": self.steps,
                "seed": self.seed,
                **self.base.describe(),
            },
            thresholds={"tensor_max_error": self.bar},
        )

    def _prompt(self) -> Batch:
        """One prompt that is compacted where the engine evicts; of a large model a short one."""
        parameters, model = self.engine.parameters, self.engine.model
        plan = make_plan("quick", model, parameters)
        blocks = 1 if plan.limited else parameters.longest_whole // PROMPT_BLOCK + 1
        length = min(blocks * PROMPT_BLOCK, max(PROMPT_BLOCK, plan.longest_prompt) // PROMPT_BLOCK * PROMPT_BLOCK)
        return batch_of(random_prompts(model, [min(length, parameters.max_input_len)], self.seed))

    def add(self, backend: str) -> None:
        """Compare with this executor too, or say why not."""
        try:
            self.harnesses[backend] = harness_for(self.engine, RunOptions(backend))
        except KvcError as error:
            self.report.left_out.append(f"{backend}: {error.message}")
        else:
            self.report.description[f"compared with {backend}"] = self.harnesses[backend].describe()["backend"]

    def compare(self, graph: str) -> None:
        """Run one graph everywhere and add a rung for each pair."""
        from polygraphy.comparator import Comparator

        from kvc_trt.verify.rungs.tensor_runners import ExecutorRunner, engine_graph, graph_runner, rewritten

        model = engine_graph(self.engine, graph)
        name, other = rewritten(model)
        base = graph_runner(BASE, model, self.engine, None)
        feeds = self._feeds(graph, base)
        runners = [base, graph_runner(name, other, self.engine, None)]
        runners += [
            ExecutorRunner(backend, graph, self.engine, harness, self._exposed(graph, harness))
            for backend, harness in self.harnesses.items()
        ]
        with self.progress.task(f"tensors of {graph}", None):
            results = Comparator.run(runners, data_loader=feeds)
        self.prefilled = dict(results[0][1][0]) if graph == "prefill" else self.prefilled
        choosers, near_ties = _choosers(self.base, graph), self.report.near_ties
        blocks = _blocks(self.base, graph)
        judge = Judge(graph, model, self.engine, choosers, self.batch, self.bar, near_ties, blocks)
        if self.directory is not None:
            _save(self.directory / graph, feeds, results, judge.tolerances(results[0][1]))
        truncates = [False, False, *(harness.truncates for harness in self.harnesses.values())]
        for side in range(1, len(runners)):
            started = time.monotonic()
            rung = judge.rung(feeds, results, side, truncates=truncates[side])
            rung.seconds = time.monotonic() - started
            self.report.rungs.append(rung)

    def _feeds(self, graph: str, runner: Any) -> list[dict[str, Array]]:
        """Inputs of each run: the prompt, or decode steps that ONNX Runtime takes one after the other."""
        if graph == "prefill":
            return [{"input_ids": self.batch.input_ids, "prompt_lengths": self.batch.prompt_lengths}]
        state = self.engine.step_state
        caches = {tensor.name: self.prefilled[tensor.name] for tensor in state}
        lengths, logits, feeds = self.prefilled["cache_lengths"], self.prefilled["logits"], []
        with runner:
            for step in range(self.steps):
                small = {
                    "token": logits.argmax(-1),
                    "positions": self.batch.prompt_lengths + step,
                    "cache_lengths": lengths,
                }
                feeds.append({**small, **caches})
                found = {name: value.copy() for name, value in runner.infer(feeds[-1]).items()}
                caches = {tensor.name: found[tensor.aliased_output] for tensor in state}
                logits, lengths = found["logits"], lengths + 1
        return feeds

    def _exposed(self, graph: str, harness: Harness) -> dict[str, str]:
        """Names that an executor of ours gives to the values of the graph's compression operators."""
        ours = {op.cache: op for op in _choosers(self.base, graph)}
        blocks = {block.cache: block for block in _blocks(self.base, graph)}
        stored = {
            own: name
            for block in _blocks(harness, graph)
            for own, name in (
                (block.keys, blocks[block.cache].keys), (block.values, blocks[block.cache].values)
            )
        }  # fmt: skip
        return stored | {
            own: name
            for op in _choosers(harness, graph)
            if op.cache in ours
            for own, name in zip(
                (*op.inputs, *op.outputs), (*ours[op.cache].inputs, *ours[op.cache].outputs), strict=False
            )
        }


def _choosers(harness: Harness, graph: str) -> list[Watched]:
    return harness.compactions() if graph == "prefill" else harness.selections()


def _blocks(harness: Harness, graph: str) -> list[StoredBlock]:
    return [block for of_token in harness.stored_blocks(graph) for block in of_token]


def _save(directory: Path, feeds: list[dict[str, Array]], results: Any, tolerances: Mapping[str, float]) -> None:
    """inputs.json, one file of outputs for each runner, and the bars as Polygraphy reads them."""
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"-o {directory}: {error.strerror}") from error
    with files_together(directory, TOLERANCES) as new:
        save_json(feeds, str(new / "inputs.json"))
        for name, runs in results:
            RunResults([(name, runs)]).save(str(new / f"{name}.json"))
        bars = json.dumps({**tolerances, "": 0.0}, indent=4)
        (new / TOLERANCES).write_text(_TOLERANCES_SCRIPT.format(bars=bars), encoding="utf-8")
