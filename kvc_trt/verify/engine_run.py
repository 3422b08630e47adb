"""Run one batch through an executor, prefill and then one token per row and step, unobserved or observed.

In an observed run, each compression operator exposes its inputs and its choice, layer by layer. The choice is compared
with the reference's on the operator's own inputs, so that rounding of earlier layers neither passes for an error of
selection nor hides one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_trt.backends.harness import Harness, ObservedExecutor, Watched
from kvc_trt.errors import VerificationFailed
from kvc_trt.graph.state import CacheSite, cache_sites
from kvc_trt.methods.base.isolated_runs import ReadByStep, float32
from kvc_trt.methods.rankings.ranking import Prompts
from kvc_trt.reference.model.rules import PromptQueries
from kvc_trt.reference.softmax import PLAIN, Softmax
from kvc_trt.runtime.session.batch import Batch
from kvc_trt.verify.codes.parts import read_caches
from kvc_trt.verify.codes.stored_tokens import StoredTokens
from kvc_trt.verify.rankings.array_errors import larger
from kvc_trt.verify.rankings.index_lists import IndexComparison, compare_kept
from kvc_trt.verify.rankings.steps import compare_step
from kvc_trt.verify.reference_run import StepInputs
from kvc_trt.verify.routes import Routes
from kvc_trt.verify.softmaxes import softmaxes

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.runtime.executor import Executor

Array = NDArray[Any]
COMPARED_EVERY = 4
"""The number of steps after which whole caches are compared; a step changes only one token in them."""
Observer = Callable[[int, NDArray[np.int64]], None]
"""Called with the step's number and the stored lengths [caches,B] after its append."""


@dataclass
class EngineRun:
    """The logits of a run of a batch, and the tokens that were fed."""

    logits: NDArray[np.float32]
    """Logits [N+1,B,vocab] after the prompt and after each of N steps."""
    tokens: NDArray[np.int64]
    """The token fed at each step, [N,B]."""
    cache_lengths: NDArray[np.int64]
    """Stored lengths [caches,B] after prefill."""


def run(
    executor: Executor,
    batch: Batch,
    steps: int,
    *,
    tokens: NDArray[np.int64] | None = None,
    after_prefill: Callable[[], None] | None = None,
    before_step: Callable[[], None] | None = None,
    after_step: Observer | None = None,
) -> EngineRun:
    """Run a batch and `steps` steps, feeding `tokens` [N,B], or the engine's own greedy tokens if None.

    VerificationFailed if prefill reports impossible lengths of caches, after which nothing could be judged.
    """
    rows = len(batch)
    executor.allocate(rows)
    prefilled = executor.prefill(batch.input_ids, batch.prompt_lengths)
    _check_lengths(prefilled.cache_lengths, executor.limits.capacities)
    for row in range(rows):
        executor.insert(prefilled, row, row)
    if after_prefill is not None:
        after_prefill()
    logits = np.empty((steps + 1, rows, executor.limits.vocab_size), np.float32)
    fed = np.empty((steps, rows), np.int64)
    logits[0] = prefilled.logits
    lengths = prefilled.cache_lengths.copy()
    for step in range(steps):
        fed[step] = logits[step].argmax(-1) if tokens is None else tokens[step]
        if before_step is not None:
            before_step()
        logits[step + 1] = executor.decode(fed[step], batch.prompt_lengths + step, lengths)
        lengths += 1
        if after_step is not None:
            after_step(step, lengths)
    return EngineRun(logits, fed, prefilled.cache_lengths)


def _check_lengths(cache_lengths: NDArray[np.int64], capacities: tuple[int, ...]) -> None:
    for cache, (lengths, slots) in enumerate(zip(cache_lengths, capacities, strict=True)):
        if lengths.min() < 0 or lengths.max() > slots:
            raise VerificationFailed(f"cache {cache} of {slots} slots holds {lengths.tolist()} tokens after prefill")


@dataclass
class ObservedRun:
    """Comparisons and measurements over every compressed layer and step."""

    compaction: IndexComparison = field(default_factory=IndexComparison)
    selection: IndexComparison = field(default_factory=IndexComparison)
    output_error: float = 0.0
    kept: dict[int, Array] = field(default_factory=dict)
    """Per cache that does not keep all of a prompt: the kept positions, [B,G,C]."""
    read: dict[int, list[Array]] = field(default_factory=dict)
    """Per cache that is not read whole: the slots that each step reads, [B,G,k] or [B,H,k]."""
    inputs: dict[int, list[StepInputs]] = field(default_factory=dict)
    """Per cache that is not read whole: the inputs of each step's choice, with the keys as the last step left them."""
    lengths: list[Array] = field(default_factory=list)
    """The stored lengths [caches,B] after each step's append."""
    run: EngineRun | None = None
    tokens: StoredTokens | None = None
    """The tokens that the caches stored, if the caches have a format."""
    routes: Routes | None = None
    """The experts of all tokens, if there are some and the engine shows what chooses them."""


def observe(
    engine: EngineDirectory, target: Harness, batch: Batch, steps: int, *, tokens: NDArray[np.int64] | None = None
) -> ObservedRun:
    """Run `batch` and `steps` steps, exposing lists of chosen tokens, and the inputs of all that chooses."""
    compactions, selections = target.compactions(), target.selections()
    exposed = {name for op in (*compactions, *selections) for name in (*op.inputs, *op.outputs)}
    sites, own = cache_sites(engine.model, engine.parameters), softmaxes(engine)
    stored = StoredTokens.of(target, sites, "prefill", "decode")
    if stored is not None:
        exposed |= stored.names()
    routes = Routes.of(engine, target, "prefill", "decode")
    if routes is not None:
        exposed |= routes.names()
    executor = target.open(expose=sorted(exposed))
    found = ObservedRun(tokens=stored, routes=routes)
    queries: dict[int, list[Array]] = {}

    def after_prefill() -> None:
        for op in compactions:
            if op.inputs:
                inputs = [executor.exposed(name) for name in op.inputs]
                indices = executor.exposed(op.outputs[-1])
                found.compaction += judge_compaction(
                    sites[op.cache], inputs, indices, batch, own[sites[op.cache].layer], truncates=target.truncates
                )
            found.kept[op.cache] = executor.exposed(op.outputs[-1]).copy()
        if routes is not None:
            routes.after_block(executor, batch.prompt_lengths)
        if stored is not None:
            stored.after_prompt(executor, executor.buffers, found.kept, batch.prompt_lengths)

    def before_step() -> None:
        if stored is not None:
            stored.before_step(executor.buffers)

    def after_step(step: int, lengths: NDArray[np.int64]) -> None:
        found.lengths.append(lengths.copy())
        if routes is not None:
            routes.after_step(executor)
        if stored is not None:
            positions = batch.prompt_lengths + step
            stored.after_step(executor, positions, lengths)
            if step % COMPARED_EVERY == COMPARED_EVERY - 1 or step == steps - 1:
                stored.compare(executor.buffers, positions)
        for op in selections:
            site = sites[op.cache]
            given = lengths[op.cache], own[site.layer], target.truncates
            compared, error = _judge_selection(site, executor, op, *given)
            found.selection += compared
            found.output_error = larger(found.output_error, error)
            found.read.setdefault(op.cache, []).append(executor.exposed(op.outputs[-1]).copy())
            queries.setdefault(op.cache, []).append(executor.exposed(op.inputs[0]).copy())

    found.run = run(
        executor, batch, steps,
        tokens=tokens, after_prefill=after_prefill, before_step=before_step, after_step=after_step,
    )  # fmt: skip
    if found.lengths:
        found.inputs = step_inputs(executor, [sites[op.cache] for op in selections], queries, found.lengths[-1])
    return found


def step_inputs(
    executor: ObservedExecutor, sites: Sequence[CacheSite], queries: Mapping[int, list[Array]], lengths: Array
) -> dict[int, list[StepInputs]]:
    """Return per cache the inputs of each step's choice: query [B,H,D], and stored keys of `lengths` [caches,B]."""
    found = {}
    for site in sites:
        rows, stored = lengths.shape[1], lengths[site.cache].max()
        read, _ = read_caches(executor.buffers, site.name, site.parameters.cache_format, rows)
        keys = read[:, :, :stored].copy()
        found[site.cache] = [StepInputs(query, keys) for query in queries[site.cache]]
    return found


def judge_compaction(
    site: CacheSite, inputs: Sequence[Array], indices: Array, batch: Batch, softmax: Softmax = PLAIN, *,
    truncates: bool = False,
) -> IndexComparison:  # fmt: skip
    """Compare the positions that KvcCompact kept with the reference's on its own `inputs`: q_window, keys and values.

    `truncates` says that tensor cores have summed the products of scores.
    """
    q_window, keys, values = inputs
    rule = site.parameters
    if (width := q_window.shape[2]) != rule.window:
        return IndexComparison(1, wrong=(f"cache {site.cache}: a window of {width}, not {rule.window}",))
    q, k, v = (float32(array) for array in (q_window, keys, values))
    lengths, unread = torch.from_numpy(batch.prompt_lengths), (q.new_empty(0), q.new_empty(0))
    # Policies that choose by a window read neither plain queries nor rotary tables.
    observed = rule.observe(PromptQueries(q, lambda: q, unread, softmax), lengths)
    expected = rule.eviction.compact(observed, k, v, lengths, rule).indices.numpy()
    prompts = Prompts((q_window,), keys, values, batch.prompt_lengths, softmax=softmax)
    return compare_kept(rule.eviction.ranking(rule), prompts, expected, indices, truncates=truncates)


def _judge_selection(
    site: CacheSite,
    executor: ObservedExecutor,
    op: Watched,
    lengths: NDArray[np.int64],
    softmax: Softmax,
    truncates: bool,
) -> tuple[IndexComparison, float]:
    rows = len(lengths)
    keys, values = read_caches(executor.buffers, site.name, site.parameters.cache_format, rows)
    query, output, selected = map(executor.exposed, (*op.inputs, *op.outputs))
    read = ReadByStep(query, keys, values, lengths, output, selected, softmax)
    return compare_step(read, site.parameters, exact=True, truncates=truncates)
