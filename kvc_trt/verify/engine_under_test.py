"""The engine under verification, with everything that several rungs need, made once on its first use."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt import policies
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.errors import InputError, VerificationFailed
from kvc_trt.graph.state import cache_sites
from kvc_trt.methods.rankings.rounding import slack_of_truncation
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.presets import load_preset
from kvc_trt.models.weights import check_weights
from kvc_trt.progress import Progress
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime import Session
from kvc_trt.runtime.session.batch import Batch, batch_of
from kvc_trt.verify.engine_run import EngineRun, ObservedRun, observe, run
from kvc_trt.verify.plan import Plan
from kvc_trt.verify.questions.prompts import prompt_lengths, random_prompts
from kvc_trt.verify.questions.question import Wording
from kvc_trt.verify.questions.wordings import wording_for
from kvc_trt.verify.reference_run import (
    Choices,
    ForcedChoices,
    Inputs,
    Judging,
    KnownRun,
    ReferenceRun,
    can_judge,
    force_choices,
    reference_run,
)
from kvc_trt.verify.report import ErrorHalves, NearTies
from kvc_trt.verify.thresholds import FLOAT32_SLACK, Thresholds

if TYPE_CHECKING:
    from kvc_trt.backends.harness import Array, Harness
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.graph.state import CacheSite
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.runtime.executor import Executor
    from kvc_trt.verify.codes.stored_tokens import StoredTokens
    from kvc_trt.verify.routes import Routes

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass
class EngineUnderTest:
    """The shared state of one verification. Each run happens once; `memory` has the peak of each phase in bytes."""

    engine: EngineDirectory
    target: Harness
    plan: Plan
    thresholds: Thresholds
    progress: Progress
    seed: int = 0
    options: RunOptions = DEFAULTS
    checkpoint_directory: Path | None = None
    halves: ErrorHalves = field(default_factory=ErrorHalves)
    near_ties: NearTies = field(default_factory=NearTies)
    memory: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak of resident memory inside the block under `name`."""
        with peak_of(name, self.memory):
            yield

    @cached_property
    def batch(self) -> Batch:
        """Prompts that reach every regime of the policy: text if the model can spell it, otherwise random tokens."""
        lengths = prompt_lengths(self.engine.parameters, self.plan.longest_prompt)
        if self.plan.limited:
            lengths = lengths[:1]
        if isinstance(self.wording, str):
            return batch_of(random_prompts(self.engine.model, lengths, self.seed))
        return batch_of(self.wording.prompts(lengths, self.seed))

    @cached_property
    def wording(self) -> Wording | str:
        """The wording in which the model is asked questions, or the reason why it cannot be asked any."""
        return wording_for(self.engine)

    @cached_property
    def engine_run(self) -> EngineRun:
        """The engine's run along its own greedy tokens; a large engine is loaded only once, for the observed run."""
        if self.plan.limited:
            assert self.observed.run is not None
            return self.observed.run
        with self.phase("engine"), self.progress.task("engine", None):
            return run(self.executor, self.batch, self.plan.steps)

    @cached_property
    def observed(self) -> ObservedRun:
        """The engine's run along the same tokens with every compression operator exposed."""
        tokens = None if self.plan.limited else self.engine_run.tokens
        with self.phase("engine"), self.progress.task("engine, every operator observed", None):
            return observe(self.engine, self.target, self.batch, self.plan.steps, tokens=tokens)

    @property
    def has_codes(self) -> bool:
        """True if the engine's caches have a format."""
        return self.engine.parameters.cache_format.keys is not None

    @property
    def is_followed(self) -> bool:
        """True if the reference continues from what the observed run stored in codes, or with its experts."""
        return self.has_codes or self._routes is not None

    @cached_property
    def judged_run(self) -> EngineRun:
        """The run whose logits are compared with the reference's: the unobserved one, unless what it stores differs.

        The reference continues from codes or experts of the observed run, so a run with others could not be judged.
        """
        run, observed = self.engine_run, self.observed.run if self.is_followed else None
        if observed is None or np.array_equal(run.logits, observed.logits):
            return run
        self.findings.append("observed, the engine rounds otherwise than unobserved; the observed run is judged")
        return observed

    @cached_property
    def reference_run(self) -> ReferenceRun:
        """The reference's run with the engine's policy, weights, tokens, codes and experts."""
        tokens = self.engine_run.tokens
        return reference_run(self.known_run(self.batch, tokens, self._stored, self._routes))

    @property
    def _stored(self) -> StoredTokens | None:
        return self.observed.tokens if self.has_codes else None

    @property
    def _routes(self) -> Routes | None:
        return None if self.engine.model.description.experts is None else self.observed.routes

    @property
    def routes_bar(self) -> float:
        """The bar of router logits that change places: each may be off by the bar of the model's logits."""
        return 2 * self.thresholds.logits_max_error

    def known_run(
        self, batch: Batch, tokens: NDArray[np.int64], stored: StoredTokens | None, routes: Routes | None
    ) -> KnownRun:
        """Return the reference's run along `tokens` [N,B], which continues from the codes of the `stored` tokens, and
        with the experts of `routes`."""
        engine = self.engine
        return KnownRun(
            engine.model, engine.weights(), engine.parameters, batch, tokens, self.progress,
            activations=engine.model.dtype, stored=stored, routes=routes, routes_bar=self.routes_bar,
        )  # fmt: skip

    @cached_property
    def forced_choices(self) -> ForcedChoices:
        """The reference's logits, under the engine's choices in rows where its own choices differ."""
        return self.forced(self.observed.read, self.observed.inputs)

    def forced(
        self, read: Mapping[int, list[Array]], inputs: Inputs, stored: StoredTokens | None = None,
        routes: Routes | None = None,
    ) -> ForcedChoices:  # fmt: skip
        """Return the reference's logits along the engine's tokens, under the engine's choices where its own differ.

        `read` has the slots that the engine's steps read of each cache, and `inputs` the inputs of their choices, as in
        `ObservedRun`. The reference continues from the codes of the `stored` tokens, and with the experts of `routes`,
        by default those of the observed run. Nothing is forced if the graph hides choices, or if they cannot be judged.
        """
        tokens = self.engine_run.tokens
        run = self.known_run(self.batch, tokens, stored or self._stored, routes or self._routes)
        with self.phase("reference"):
            ours = self.reference_run if stored is None and routes is None else reference_run(run)
        return self._forced(run, ours, self.observed.kept, read, inputs)

    def reference_along(self, batch: Batch, tokens: NDArray[np.int64]) -> ForcedChoices:
        """Return the reference's logits along `tokens` [N,B], with codes, choices and experts of the engine's run."""
        with self.phase("engine"):
            seen = observe(self.engine, self.target, batch, len(tokens), tokens=tokens)
        run = self.known_run(batch, tokens, seen.tokens, seen.routes)
        with self.phase("reference"):
            ours = reference_run(run)
        return self._forced(run, ours, seen.kept, seen.read, seen.inputs)

    def _forced(
        self, run: KnownRun, ours: ReferenceRun, kept: Mapping[int, Array], read: Mapping[int, list[Array]],
        inputs: Inputs,
    ) -> ForcedChoices:  # fmt: skip
        seen = self._choices(ours, kept, read)
        if seen is None or not can_judge(site.parameters for site in self.sites):
            return ForcedChoices(ours.logits, keys_off=ours.keys_off, routes=ours.routes)
        truncation = slack_of_truncation(self.engine.model.head_size) if self.target.truncates else 0.0
        judging = Judging(self.thresholds.choice_slack, inputs, FLOAT32_SLACK + truncation)
        with self.phase("reference"):
            return force_choices(run, ours, seen, judging)

    def _choices(
        self, ours: ReferenceRun, kept: Mapping[int, Array], read: Mapping[int, list[Array]]
    ) -> Choices | None:
        """Return the engine's choices in the form of `ReferenceRun.choices`; None if the graph hides some of them.

        A cache that keeps whole prompts may have no list of kept positions; then it is taken from the reference's run
        `ours`, which keeps the same.
        """
        chosen = {}
        for site in self.sites:
            rule, cache = site.parameters, site.cache
            if not rule.chooses:
                continue
            if (rule.eviction.evicts and cache not in kept) or (rule.reads_a_part and cache not in read):
                return None
            own = ours.choices[cache][0]
            chosen[cache] = [kept.get(cache, own), *read.get(cache, [])]
        return chosen

    @cached_property
    def reference(self) -> ReferenceDecoder:
        """The reference decoder with its weights in memory, for free decoding."""
        parameters = self.engine.parameters
        return ReferenceDecoder(
            self.engine.model, self.engine.weights(), method=policies.method(parameters), parameters=parameters
        )

    @cached_property
    def executor(self) -> Executor:
        """The executor of the engine as users run it."""
        return self.target.open()

    @cached_property
    def twin(self) -> Executor:
        """The executor of the dense twin, which is made in memory from config.json and the same weight file."""
        return self.target.open_twin()

    @cached_property
    def beside_twin(self) -> Executor:
        """An executor of the engine that agrees with the twin bit for bit, and may be slower than the usual one."""
        return self.target.open_beside_twin() or self.executor

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A phase in which the engine answers our requests: an InputError becomes a VerificationFailed."""
        with self.phase("engine"):
            try:
                yield
            except InputError as error:
                raise VerificationFailed(f"the engine cannot answer: {error.message}") from error

    def session(self, rows: int) -> Session:
        """Return a session of the engine with `rows` rows, without a tokenizer."""
        return Session(self.executor, None, rows)

    def twin_session(self, rows: int) -> Session:
        """Return a session of the dense twin with `rows` rows, without a tokenizer."""
        return Session(self.twin, None, rows)

    @cached_property
    def sites(self) -> tuple[CacheSite, ...]:
        """All caches of the engine."""
        return cache_sites(self.engine.model, self.engine.parameters)

    def choosing_caches(self) -> set[int]:
        """Return the caches that must list the tokens kept of a prompt, or read by a step."""
        rules = {site.cache: site.parameters for site in self.sites}
        return {c for c, rule in rules.items() if rule.compresses}

    def compresses_nothing(self) -> bool:
        """Return whether the policy keeps and reads every token of the batch."""
        lengths = self.batch.prompt_lengths.tolist()
        longest, rules = max(lengths), [site.parameters for site in self.sites]
        evicts = any(rule.eviction.evicts and n > rule.kept_of(n) for rule in rules for n in lengths)
        selects = any(rule.reads_a_part and longest + self.plan.steps > rule.dense_limit for rule in rules)
        return not (evicts or selects)

    @cached_property
    def checkpoint(self) -> tuple[WeightSource | None, str]:
        """The unquantised weights to compare with, and their description; or None, and the reason for it."""
        directory = self.checkpoint_directory or self._shipped_checkpoint()
        if directory is None:
            return None, "no checkpoint given (--checkpoint PATH)"
        source = weights_of(open_checkpoint(directory))
        check_weights(self.engine.model, source)
        recorded = self.engine.manifest.checkpoint.fingerprint
        if recorded == source.fingerprint():
            return source, f"the engine's weights against {directory}"
        if self.checkpoint_directory is None:
            return None, "the shipped checkpoint is not the one this engine was built from"
        self.findings.append(f"{directory} is not the checkpoint this engine was built from (manifest.json)")
        return source, f"the engine's weights against {directory}, another checkpoint"

    def _shipped_checkpoint(self) -> Path | None:
        try:
            return load_preset(self.engine.build.model).checkpoint
        except InputError:
            return None


@contextlib.contextmanager
def peak_of(phase: str, peaks: dict[str, int]) -> Iterator[None]:
    """Record in `peaks` the largest resident size in bytes inside the block; an earlier, larger peak of `phase` stays.

    If the kernel cannot reset the peak, the peak of the process so far is recorded.
    """
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)
    try:
        yield
    finally:
        peaks[phase] = max(peaks.get(phase, 0), _peak_bytes())


def _peak_bytes() -> int:
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
