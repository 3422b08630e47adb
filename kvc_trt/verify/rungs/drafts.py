"""Check the draft graph on the whole model: passes along known tokens, some of them rejected, against the reference.

Each token of a draft replaces a decode step. So its logits are judged by the reference's steps along the same tokens,
and the slots that it reads by the reference on its own inputs: entries and page bounds without the tokens after it. A
rejection must remove every trace of the rejected tokens: two passes that differ only in these leave equal bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.harness import Array, ObservedExecutor, Watched
from kvc_trt.methods.base.isolated_runs import ReadByStep
from kvc_trt.operators.schema import parts_of
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.runtime.executor import CheckedDraft, DraftExecutor
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.codes.parts import read_caches
from kvc_trt.verify.codes.stored_tokens import StoredTokens
from kvc_trt.verify.engine_run import step_inputs
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.rankings.array_errors import larger
from kvc_trt.verify.rankings.index_lists import IndexComparison
from kvc_trt.verify.rankings.steps import compare_step
from kvc_trt.verify.reference_run import ForcedChoices, StepInputs
from kvc_trt.verify.routes import Routes
from kvc_trt.verify.rungs.codes import codes_checks, keys_check
from kvc_trt.verify.rungs.operators import index_check
from kvc_trt.verify.softmaxes import softmaxes

if TYPE_CHECKING:
    from kvc_trt.graph.state import CacheSite

Int64 = NDArray[np.int64]


class ObservedDrafts(ObservedExecutor, DraftExecutor, Protocol):
    """An executor that checks drafts and exposes the slots that their tokens read."""


@dataclass
class DraftsRun:
    """The results of passes along given tokens."""

    logits: list[NDArray[np.float32]]
    """[B,vocab]: the logits after the prompt and after each token that a pass kept."""
    read: dict[int, list[Array]] = field(default_factory=dict)
    """Per cache, the slots that each kept token read; empty if the executor does not expose them."""
    inputs: dict[int, list[StepInputs]] = field(default_factory=dict)
    """Per cache, the inputs of each kept token's choice."""
    selection: IndexComparison = field(default_factory=IndexComparison)
    output_error: float = 0.0
    passes: int = 0
    compared: int = 0
    """The number of tensors and logits compared after two passes with different rejected tokens."""
    unequal: int = 0
    """The number of those that are not equal bit for bit."""


def check_drafts(tested: EngineUnderTest) -> list[Check]:
    """Compare passes with the reference's steps; nothing if the engine checks no drafts.

    The limited check of a large model leaves them out, as it does turns.
    """
    limits = tested.executor.limits
    if tested.plan.limited or limits.no_drafts is not None or len(tested.engine_run.tokens) <= limits.draft_tokens:
        return []
    watched = tested.target.draft_selections()
    exposed = {name for one in watched for op in one for name in _names(op)}
    stored = StoredTokens.of(tested.target, tested.sites, "prefill", "draft")
    if stored is not None:
        exposed |= {*stored.names(), *(op.outputs[-1] for op in tested.target.compactions())}
    routes = Routes.of(tested.engine, tested.target, "prefill", "draft")
    if routes is not None:
        exposed |= routes.names()
    executor = tested.target.open(expose=sorted(exposed))
    if not isinstance(executor, DraftExecutor):
        return []
    with tested.phase("engine"):
        found = _Passes(tested, executor, watched, stored, routes).run()  # type: ignore[arg-type]
    checks = _reference_checks(tested, found, stored, routes)
    if found.selection.compared:
        checks.append(index_check("drafts: tokens read", found.selection, "on the inputs they really got"))
        bar = tested.thresholds.value_error
        sample = f"{found.selection.compared} lists"
        checks.append(at_most("drafts: values of what was read", sample, found.output_error, bar))
        _count(tested, found.selection)
    note = "of two passes with other rejected tokens, bit for bit"
    left = at_most("drafts: traces of a rejection", f"{found.compared} tensors", found.unequal, 0, note=note)
    return [*checks, left]


def _reference_checks(
    tested: EngineUnderTest, found: DraftsRun, stored: StoredTokens | None, routes: Routes | None
) -> list[Check]:
    """Compare with the reference's steps, under the codes, choices and experts of the passes, or of steps if passes
    expose none."""
    bar = tested.thresholds.logits_max_error
    if stored is None and routes is None:
        shown = tested.forced(found.read, found.inputs) if found.read else None
        return [_logits_check(tested, found, shown or tested.forced_choices)]
    forced, checks = tested.forced(found.read, found.inputs, stored, routes), []
    if stored is not None:
        assert forced.keys_off is not None
        checks = [*codes_checks(stored.found, "drafts: "), keys_check(forced.keys_off, bar, "drafts: ")]
    if forced.routes is not None:
        checks.append(forced.routes.check("drafts: "))
    return [*checks, _logits_check(tested, found, forced)]


def _logits_check(tested: EngineUnderTest, found: DraftsRun, forced: ForcedChoices) -> Check:
    ours = np.stack(found.logits)
    expected = forced.logits[: len(ours)]
    scale = max(1.0, float(np.abs(expected).max()))
    error = float(np.abs(ours - expected).max()) / scale
    sample = f"{ours.shape[1]} rows x {len(ours) - 1} tokens"
    note = f"{found.passes} passes; the draft's tokens were rejected from each place on"
    return at_most("drafts: max logit error", sample, error, tested.thresholds.logits_max_error, note=note)


def _count(tested: EngineUnderTest, found: IndexComparison) -> None:
    ties = tested.near_ties
    ties.lists_compared += found.compared
    ties.lists_admitted += found.near_ties
    ties.tokens_swapped += found.swapped_tokens


def _names(op: Watched) -> tuple[str, ...]:
    return (*op.inputs, *op.outputs)


class _Passes:
    """Feeds the tokens of the engine's steps again with passes that in turn keep 1, 2, ... of their tokens."""

    def __init__(
        self, tested: EngineUnderTest, executor: ObservedDrafts, watched: Sequence[Sequence[Watched]],
        stored: StoredTokens | None, routes: Routes | None,
    ) -> None:  # fmt: skip
        self._tested, self._executor, self._watched, self._stored = tested, executor, watched, stored
        self._routes = routes
        self._tokens = 1 + executor.limits.draft_tokens
        self._positions, self._path = tested.batch.prompt_lengths, tested.engine_run.tokens
        self._random = np.random.default_rng(tested.seed)
        self._queries: dict[int, list[Array]] = {}
        self._softmaxes = softmaxes(tested.engine)

    def run(self) -> DraftsRun:
        """Run as many whole passes as the path allows."""
        executor, batch, rows = self._executor, self._tested.batch, len(self._tested.batch)
        executor.allocate(rows)
        executor.load_drafts()
        prefilled = executor.prefill(batch.input_ids, batch.prompt_lengths)
        for row in range(rows):
            executor.insert(prefilled, row, row)
        self._found, self._lengths = DraftsRun([prefilled.logits]), prefilled.cache_lengths.copy()
        if self._routes is not None:
            self._routes.after_block(executor, batch.prompt_lengths)
        if self._stored is not None:
            compactions = self._tested.target.compactions()
            listed = {op.cache: executor.exposed(op.outputs[-1]).copy() for op in compactions}
            self._stored.after_prompt(executor, executor.buffers, listed, batch.prompt_lengths)
        step = 0
        while step + self._tokens <= len(self._path):
            kept = 1 + self._found.passes % self._tokens
            if kept < self._tokens and self._found.passes < self._tokens:
                self._compare_rejections(step, kept)
            checked = self._pass(step, kept)
            self._judge(kept)
            self._store(step, kept)
            if self._routes is not None:
                self._routes.after_draft(executor, rows, kept)
            self._reject(checked, kept)
            if self._stored is not None:
                self._stored.compare(executor.buffers, self._positions + step + kept - 1)
            self._found.logits += list(checked.logits[:kept].copy())
            self._found.passes += 1
            step, self._lengths = step + kept, self._lengths + kept
        sites = [self._tested.sites[cache] for cache in self._queries]
        self._found.inputs = step_inputs(executor, sites, self._queries, self._lengths)
        return self._found

    def _pass(self, step: int, kept: int) -> CheckedDraft:
        """Run a pass whose first `kept` tokens are those of the engine's steps, and whose others differ from them."""
        tokens, vocabulary = self._path[step : step + self._tokens].copy(), self._executor.limits.vocab_size
        others = tokens[kept:]
        tokens[kept:] = (others + self._random.integers(1, vocabulary, others.shape)) % vocabulary
        return self._executor.check_draft(tokens, self._positions + step, self._lengths)

    def _store(self, step: int, kept: int) -> None:
        """Record the vectors that the pass stored for the kept tokens."""
        for token in range(kept if self._stored is not None else 0):
            assert self._stored is not None
            positions, lengths = self._positions + step + token, self._lengths + token + 1
            self._stored.after_step(self._executor, positions, lengths, graph="draft", token=token)

    def _reject(self, checked: CheckedDraft, kept: int) -> None:
        if kept < self._tokens:
            for row, undo in enumerate(checked.undo):
                self._executor.take_back(row, undo, self._lengths[:, row], kept)

    def _compare_rejections(self, step: int, kept: int) -> None:
        """Run a pass twice from one state with other rejected tokens, compare the results, and restore that state."""
        before = [
            {name: tensor.copy() for name, tensor in self._executor.read_row(row).items()}
            for row in range(len(self._positions))
        ]
        left = []
        for _ in range(2):
            checked = self._pass(step, kept)
            self._reject(checked, kept)
            left.append([checked.logits[:kept].tobytes(), *self._digests(step + kept, self._lengths + kept)])
            for row, tensors in enumerate(before):
                self._executor.write_row(row, tensors.items())
        self._found.compared += len(left[0])
        self._found.unequal += sum(one != other for one, other in zip(*left, strict=True))

    def _digests(self, fed: int, lengths: Int64) -> Iterator[bytes]:
        """Yield for each row digests of the parts in use of all tensors that steps write, after `fed` tokens."""
        for row, start in enumerate(self._positions):
            tensors = self._executor.read_row(row)
            for site in self._tested.sites:
                entries = {"C": int(lengths[site.cache, row]), "L": int(start) + fed}
                for name, part in _parts_in_use(site, entries):
                    yield hashlib.sha256(tensors[name][part].tobytes()).digest()

    def _judge(self, kept: int) -> None:
        """Judge the slots that each kept token read, on its own inputs."""
        executor, rows = self._executor, len(self._positions)
        for token, operators in enumerate(self._watched[:kept]):
            for op in operators:
                site = self._tested.sites[op.cache]
                keys, values = read_caches(executor.buffers, site.name, site.parameters.cache_format, rows)
                query, output, selected = map(executor.exposed, _names(op))
                lengths = self._lengths[op.cache] + token + 1
                read = ReadByStep(query, keys, values, lengths, output, selected, self._softmaxes[site.layer])
                truncates = self._tested.target.truncates
                compared, error = compare_step(read, site.parameters, exact=True, truncates=truncates)
                self._found.selection += compared
                self._found.output_error = larger(self._found.output_error, error)
                self._found.read.setdefault(op.cache, []).append(selected.copy())
                self._queries.setdefault(op.cache, []).append(query.copy())


def _parts_in_use(site: CacheSite, entries: Mapping[str, int]) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yield each tensor of a row's cache that steps write, and the part of it that is in use.

    `entries` has the number of stored entries along an axis of slots, C, and along one of positions, L.
    """
    form = site.parameters.cache_format
    for tensor in (K_CACHE, V_CACHE, *site.parameters.selection.state):
        for part in parts_of(tensor, form):
            yield f"{part.name}.{site.name}", tuple(slice(entries.get(symbol)) for symbol in part.shape[1:])
