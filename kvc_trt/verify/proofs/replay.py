"""Check whether a KV proof is true: the reference reads the same tokens on a CPU and chooses for itself, step by step.

A list equal to the reference's is right. One that differs is judged like any choice of an engine (`rankings`): it is
right only if rounding can explain it. A digest does not tell which tokens were swapped, and some engines round too
coarsely, or choose by scores whose near-ties cannot be proven: then the engine itself is run again (`engine_replay`).
If its choice differs as well, the report names the first place, and calls it neither true nor false.

If caches have a format, steps choose by codes, and rounding may have made another code than the reference makes: then
the reference continues with the codes of the engine, which is run again for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvc_trt.backends.reported_lists import check_covered, made_by
from kvc_trt.backends.run_options import DEFAULTS
from kvc_trt.engine.program import engine_program
from kvc_trt.errors import InputError
from kvc_trt.graph.state import cache_sites
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.progress import Progress
from kvc_trt.proof.lists import Lists, decode, decode_rows, digest_at, encode
from kvc_trt.runtime.request import check_token_ids
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.proofs.engine_replay import replay_by_engine
from kvc_trt.verify.proofs.report import ProofReport
from kvc_trt.verify.reference_run import Choices, Judging, KnownRun, can_judge, reference_run, replay
from kvc_trt.verify.thresholds import thresholds_for

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.proof import Proof
    from kvc_trt.verify.codes.stored_tokens import StoredTokens


class _Place(NamedTuple):
    """One entry of a proof: the lists of a cache at a step."""

    step: int
    cache: int
    digest: bytes
    lists: bytes | None


def replay_proof(engine: EngineDirectory, proof: Proof, source: str, progress: Progress | None = None) -> ProofReport:
    """Check a proof, which was read from `source`, with the engine's weights and policy in PyTorch.

    The report has everything that is not true. InputError for a proof of another engine or policy, or one that this
    engine cannot have made.
    """
    _check_fits(engine, proof, source)
    problems = tuple(proof.problems())
    own_engine = made_by(engine, DEFAULTS).engine
    report = ProofReport(
        str(engine.path), proof.made_by.policy_name, proof.kind, proof.root, len(proof.prompt_token_ids),
        len(proof.fed), problems=problems, other_engine=proof.made_by.engine != own_engine,
    )  # fmt: skip
    return _Replay(engine, proof, progress).into(report)


class _Replay:
    """Runs the reference along the tokens of one proof, and compares its choices with the proof's."""

    def __init__(self, engine: EngineDirectory, proof: Proof, progress: Progress | None) -> None:
        self._engine, self._proof, self._progress = engine, proof, progress
        self._batch = batch_of([proof.prompt_token_ids])
        self._tokens = np.array(proof.fed, np.int64).reshape(-1, 1)

    @cached_property
    def _own(self) -> Choices:
        return reference_run(self._known_run()).choices

    def _known_run(self, stored: StoredTokens | None = None) -> KnownRun:
        engine = self._engine
        return KnownRun(
            engine.model, engine.weights(), engine.parameters, self._batch, self._tokens, self._progress,
            activations=engine.model.dtype, stored=stored,
        )  # fmt: skip

    @property
    def _has_codes(self) -> bool:
        return self._engine.parameters.cache_format.keys is not None

    @cached_property
    def _slack(self) -> float | None:
        stored = GraphWeights(self._engine.weight_file).precision
        return thresholds_for(stored, self._proof.made_by.prefill_precision).choice_slack

    @property
    def _rounds_finely(self) -> bool:
        """True if exceeding the bound refutes a list; in half precision one honest list of hundreds can exceed it."""
        finest = thresholds_for("fp32").choice_slack
        return self._slack is not None and finest is not None and self._slack <= finest

    @property
    def _unjudged(self) -> str | None:
        """The reason why a difference cannot be judged, so that it is possibly no error; None if it can be judged."""
        if self._slack is None:
            return "this engine rounds too coarsely to tell near-ties from errors against the reference"
        if not can_judge(site.parameters for site in cache_sites(self._engine.model, self._engine.parameters)):
            return f"near-ties of policy {self._engine.parameters.policy} cannot be proven"
        return None

    @property
    def _why_unsure(self) -> str:
        """The reason why even a difference that can be judged is possibly no error."""
        if self._proof.kind == "lists" and self._has_codes:
            return "rounding may have made another code of a key, or another scale, where it was stored"
        return "a digest cannot tell a near-tie from an error; a proof with lists can"

    def into(self, report: ProofReport) -> ProofReport:
        """Return the report with the results of the replay."""
        places = list(_places(self._proof))
        other = [place for place in places if self._differs(place)]
        choosing = sum(self._leaves_out(place) for place in places)
        report = replace(report, lists=len(places), equal=len(places) - len(other), choosing=choosing)
        if not other:
            return report
        if self._proof.kind == "lists":
            wrong = [found for place in other if (found := self._malformed(place)) is not None]
            if wrong:
                return _with(report, *wrong)
            if self._unjudged is None:
                claimed = {place: decode(place.lists) for place in places if place.lists is not None}
                judged = self._judged(report, claimed)
                if judged.passed or (self._rounds_finely and not self._has_codes):
                    return judged
                if self._has_codes:  # which only steps choose by
                    of_prompt = {place: lists for place, lists in claimed.items() if place.step == 0}
                    judged = self._judged(report, of_prompt)
                    if not judged.passed and self._rounds_finely:
                        return judged
                again = self._by_engine(report, places, other)
                return again if again.passed or judged.passed else judged
        elif (nothing := self._chooses_nothing(other[0])) is not None:
            return _with(report, nothing)
        return self._by_engine(report, places, other)

    def _judged(
        self, report: ProofReport, claimed: Mapping[_Place, Lists], stored: StoredTokens | None = None
    ) -> ProofReport:
        """Force lists on the reference, and judge each of them on the reference's inputs at that point.

        The reference continues with the codes of the `stored` tokens, or with its own if None."""
        forced = {cache: list(lists) for cache, lists in self._own.items()}
        for place, lists in claimed.items():
            forced[place.cache][place.step] = lists[None]
        found = replay(self._known_run(stored), forced, Judging(self._slack)).explained
        assert found is not None
        return _with(replace(report, near_ties=found.near_ties), *found.wrong)

    def _by_engine(self, report: ProofReport, places: list[_Place], other: list[_Place]) -> ProofReport:
        """Run the engine again and compare its choices with the proof's; the reference's differ at `other`."""
        first = f"{_at(other[0])}: the lists are not the reference's, as of {len(other)} {report.kind} entries"
        why = self._unjudged or self._why_unsure
        found = replay_by_engine(self._engine, self._proof)
        if isinstance(found, str):
            return replace(report, differences=(f"{first} ({why}; the engine cannot be run again here: {found})",))
        chosen = {place: lists for place in places if (lists := found.lists(place.cache, place.step)) is not None}
        unlike = [
            place for place in places
            if place not in chosen or digest_at(place.cache, place.step, encode(chosen[place])) != place.digest
        ]  # fmt: skip
        report = replace(report, reproduced=len(places) - len(unlike))
        if unlike:
            both = next((place for place in unlike if place in other), unlike[0])
            differs = f"{_at(both)}: neither the reference nor the engine, run again here, chooses these lists"
            return replace(report, differences=(f"{differs} ({why})",))
        if found.judged.wrong:
            return _with(report, f"the engine does not choose by its policy's rule: {found.judged.wrong[0]}")
        if self._unjudged is not None:
            return report
        judged = self._judged(report, chosen, found.tokens)
        return judged if judged.passed or self._rounds_finely else report

    def _chooses_nothing(self, place: _Place) -> str | None:
        """Return the problem of a digest that belongs to a list of all tokens; None for any other digest."""
        for count in self._available(place):
            if place.digest == digest_at(place.cache, place.step, encode(self._all(place, count))):
                return f"{_at(place)}: all {count} tokens were taken, where {self._engine.parameters.policy} chooses"
        return None

    def _malformed(self, place: _Place) -> str | None:
        """Return the problem of lists that no near-tie can explain; None if near-ties may explain them."""
        assert place.lists is not None
        found, own = decode_rows(place.lists), self._lists(place)
        if len(found) != len(own):
            return f"{_at(place)}: lists of {len(found)} heads, expected {len(own)}"
        for head, (row, expected) in enumerate(zip(found, own, strict=True)):
            count, wanted = int((row >= 0).sum()), int((expected >= 0).sum())
            if count != wanted:
                everything = "all " if count in self._available(place) else ""
                return f"{_at(place)}, head {head}: {everything}{count} tokens were taken, expected {wanted}"
            entries = row[:count]  # of a list with holes, its first ones
            if (entries < 0).any() or (np.diff(entries) <= 0).any() or (count and entries[-1] >= self._stored(place)):
                return f"{_at(place)}, head {head}: the list does not ascend, or names tokens that are not there"
        return None

    def _differs(self, place: _Place) -> bool:
        """Return whether a place's digest, or its lists, differ from those of the reference's own lists."""
        expected = encode(self._lists(place))
        return digest_at(place.cache, place.step, expected) != place.digest or place.lists not in (None, expected)

    def _lists(self, place: _Place) -> Lists:
        lists: Lists = self._own[place.cache][place.step][0]
        return lists

    def _stored(self, place: _Place) -> int:
        """Return the number of tokens to choose from: those of the prompt, or those stored at a step."""
        prompt = len(self._proof.prompt_token_ids)
        if place.step == 0:
            return prompt
        kept = self._own[place.cache][0][0]
        return int((kept[0] >= 0).sum()) + place.step

    def _available(self, place: _Place) -> tuple[int, ...]:
        """Return the lengths of a list of all tokens, after eviction of the prompt and without it."""
        return self._stored(place), len(self._proof.prompt_token_ids) + place.step

    def _all(self, place: _Place, count: int) -> Lists:
        return np.tile(np.arange(count), (len(self._lists(place)), 1))

    def _leaves_out(self, place: _Place) -> bool:
        return bool(((self._lists(place) >= 0).sum(-1) < self._stored(place)).any())


def _check_fits(engine: EngineDirectory, proof: Proof, source: str) -> None:
    """Raise InputError unless a proof is of the engine's weights and policy, and of an answer that fits the engine."""
    own, given = made_by(engine, DEFAULTS), proof.made_by
    for name, mine, its in (
        ("policy", own.policy, given.policy), ("model", own.model, given.model), ("weights", own.weights, given.weights)
    ):  # fmt: skip
        if mine != its:
            who = f"{given.model_name} under {given.policy_name}"
            found = f"its {name} digest is {its[:12]}, expected {mine[:12]}"
            raise InputError(f"{source} is of another engine ({who}): {found}")
    sites, limits = cache_sites(engine.model, engine.parameters), engine_program(engine).limits
    kept = {one.cache for one in proof.caches if one.kept is not None}
    read = {one.cache for one in proof.caches if one.read}
    unknown = sorted({one.cache for one in proof.caches} - {site.cache for site in sites})
    if unknown:
        raise InputError(f"{source}: cache {unknown[0]} is none of the engine's {len(sites)}")
    check_covered(engine, kept, read if proof.fed else {site.cache for site in sites}, source)
    for what, tokens in (("prompt", proof.prompt_token_ids), ("continuation", proof.continuation_token_ids),
                         ("answer", proof.answer_token_ids)):  # fmt: skip
        check_token_ids(tokens, limits, f"{source}: {what}")
    total = len(proof.prompt_token_ids) + len(proof.fed)
    if len(proof.prompt_token_ids) > limits.max_input_len or total > limits.max_sequence_len:
        raise InputError(
            f"{source}: {len(proof.prompt_token_ids)} prompt tokens and {total} in all, "
            f"expected at most {limits.max_input_len} and {limits.max_sequence_len}"
        )
    for one in proof.caches:
        rule = sites[one.cache].parameters
        if one.read and not rule.reads_a_part:
            raise InputError(f"{source}: cache {one.cache} has lists of steps, and the policy reads all of it")


def _places(proof: Proof) -> Iterator[_Place]:
    """Yield every entry in the order in which it was chosen: step by step, and cache by cache."""
    for record in proof.caches:
        if record.kept is not None:
            yield _Place(0, record.cache, record.kept, record.kept_lists)
    for step in range(len(proof.fed)):
        for record in proof.caches:
            if record.read:
                lists = None if record.read_lists is None else record.read_lists[step]
                yield _Place(step + 1, record.cache, record.read[step], lists)


def _at(place: _Place) -> str:
    return f"cache {place.cache}, step {place.step}"


def _with(report: ProofReport, *problems: str) -> ProofReport:
    return replace(report, problems=(*report.problems, *problems))
