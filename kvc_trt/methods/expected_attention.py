"""Expected Attention: of a prompt, the tokens stay that queries to come can be expected to attend to ("Expected
Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution", arXiv 2510.00636).

The prompt's queries, before their rotary embedding, have a mean and a covariance; turned to the positions that follow
the prompt, these give in closed form the attention that each key will receive. The question takes no part, so a prompt
can be compressed before the question is known. `expected-attention` then attends densely to the kept tokens,
`expected-attention-hybrid` reads the best of them as RocketKV does, and keeps as much of a prompt as RocketKV.

After a turn of a conversation, stored and new tokens are ranked like a prompt, by the queries expected after it: their
mean and covariance are those of the turn's own queries, since earlier ones are not stored. The first tokens of the
conversation stay.

Deviations: a value counts by its own length, not by that of its contribution to the residual stream; every KV head has
the same budget; the answer's tokens all stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.graph_context import PromptLayer
from kvc_trt.methods.base.inputs import EVERY_POLICY, SELECTION, PolicyInputs, constants
from kvc_trt.methods.base.isolated_runs import (
    Array,
    Found,
    PromptCase,
    PromptRun,
    RunnableAlone,
    TurnCase,
    TurnRun,
    float32,
)
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.rocketkv_budget import cache_capacity
from kvc_trt.methods.base.scored_eviction import ScoredEviction, checked_prompt_budget
from kvc_trt.methods.full import DENSE
from kvc_trt.methods.hybrid import BEST_OF_PAGES, select_from_pages
from kvc_trt.methods.rankings.attended_entries import WeighedEntries, WeightScores, magnitude, softmax
from kvc_trt.methods.rankings.ranking import ChosenList, PromptRanking, Prompts
from kvc_trt.methods.rankings.rounding import (
    LARGEST_EXPONENT,
    RELATIVE_ROUNDING,
    SMALLEST_NORMAL,
    BoundedScores,
    Float64,
    lost_to_underflow,
    off,
)
from kvc_trt.models.rope import rotary_tables
from kvc_trt.operators.compaction.expected_attention import (
    COMPACT_EXPECTED_ATTENTION,
    COMPACT_EXPECTED_ATTENTION_OF_TURN,
)
from kvc_trt.operators.compaction.expected_queries import EXPECTED_QUERIES, EXPECTED_QUERIES_OF_TURN

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.methods.base.graph_context import TurnLayer
    from kvc_trt.operators.emitter import Value
    from kvc_trt.operators.schema import Operator
    from kvc_trt.reference import Compacted, ExpectedQueries, Turn
    from kvc_trt.reference.model.rules import PromptQueries

SINKS = 4
FUTURE_POSITIONS = 512


@dataclass(frozen=True)
class ByExpectedQueries(PromptRanking):
    """Prompt tokens after the `sinks`, which all stay, ranked by the attention that expected queries give them."""

    sinks: int

    @override
    def explain(self, inputs: Prompts, chosen: ChosenList, slack: float) -> str | None:
        """Judge the list by mean and covariance of the expected queries."""
        if chosen.missing.min() < self.sinks:
            return f"the first {self.sinks} tokens must be kept, {chosen.missing.min()} is not"
        mean, covariance = inputs.observed_by(chosen)
        keys, values = (table[self.sinks :] for table in (inputs.keys_of(chosen), inputs.values_of(chosen)))
        scores = expected_scores(mean, covariance, keys, values, slack)
        taken = chosen.taken[chosen.taken >= self.sinks] - self.sinks
        return chosen.instead("kept", scores.unexplained(taken))


def expected_scores(mean: Float64, covariance: Float64, keys: Float64, values: Float64, slack: float) -> BoundedScores:
    """Score the tokens of one KV head: mean [g, D], covariance [g, D, D] of its queries; keys, values [n, D].

    The exponent mu.k / sqrt(D) + k.Sigma.k / 2D is an expectation over queries of length sqrt(|mu|^2 + tr Sigma). With
    a = that length times |k| / sqrt(D), and b = sqrt(k.Sigma.k / D), it moves by 2^-21 a (1 + b).

    The mean weight is multiplied by the value's length, and so is the part that underflow has taken from it; where the
    value is short, the product itself may be lost.
    """
    size = keys.shape[1]
    spread = np.maximum(np.einsum("nd,gde,ne->gn", keys, covariance, keys), 0) / size
    logits = mean @ keys.T / np.sqrt(size) + spread / 2
    attention = np.exp(logits - logits.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)

    lengths = np.sqrt((mean**2).sum(-1) + np.trace(covariance, axis1=1, axis2=2))
    reach = lengths[:, None] * np.linalg.norm(keys, axis=-1) / np.sqrt(size)
    moves = off(slack) * (1 + reach * (1 + np.sqrt(spread)))
    moves += (attention * moves).sum(-1, keepdims=True)  # the divisor of all weights moves too
    moves = np.minimum(moves, LARGEST_EXPONENT)

    length = np.linalg.norm(values, axis=-1)
    low, exact, high = (length / len(mean) * (attention * np.exp(sign * moves)).sum(0) for sign in (-1, 0, 1))
    return BoundedScores(exact, low - lost_to_underflow(len(mean)) * np.maximum(1, length), high)


@dataclass
class ExpectedEntries(WeighedEntries):
    """Entries of one row, ranked by the attention that expected queries give them; the first `sinks` always stay."""

    mean: Array
    """[H,D]"""
    covariance: Array
    """[H,D,D]"""
    keys: Array
    """[G,n,D]"""
    values: Array
    """[G,n,D]"""
    sinks: int

    @override
    def scores(self, head: int) -> WeightScores:
        """Score the entries after the sinks by the attention of expected queries, times the lengths of their values.

        A head's weight is divided by their number and multiplied by that length, in whatever order: it is lost if it is
        too small anywhere.
        """
        keys, values = (table[head, self.sinks :].astype(np.float64) for table in (self.keys, self.values))
        of_group = slice(head * len(self.mean) // len(self.keys), (head + 1) * len(self.mean) // len(self.keys))
        mean, covariance = (table[of_group].astype(np.float64) for table in (self.mean, self.covariance))
        size, heads = keys.shape[1], len(mean)
        spread = np.einsum("nd,gde,ne->gn", keys, covariance, keys) / (2 * size)
        shares = softmax(mean @ keys.T / np.sqrt(size) + spread) / heads
        length = np.linalg.norm(values, axis=-1)
        of_spread = float(np.linalg.norm(covariance, axis=(1, 2)).max() * (keys**2).sum(-1).max()) / (2 * size)
        tolerance = RELATIVE_ROUNDING * (1 + magnitude(mean, keys) + of_spread)
        is_small = shares * np.minimum(1, length) < SMALLEST_NORMAL * (1 + tolerance)
        value, lost = (table.sum(0) * length for table in (shares, np.where(is_small, shares, 0)))
        return WeightScores(self.sinks, value, lost, tolerance, (keys, values))


class ExpectedAttention(ScoredEviction):
    """Keep the first tokens and those that queries after the prompt should attend to, one list per KV head."""

    name = "expected-attention"
    operators = (COMPACT_EXPECTED_ATTENTION, EXPECTED_QUERIES)
    operator_of_stored = COMPACT_EXPECTED_ATTENTION_OF_TURN
    turn = (
        "Stored and new tokens compete for the prompt budget: those stay that queries like the turn's can be expected "
        "to attend to."
    )
    query_agnostic = True
    observes_every_query = True

    @override
    def observe(self, queries: PromptQueries, prompt_lengths: Tensor, rule: Constants) -> ExpectedQueries:
        """Estimate the queries that follow each prompt from all queries of the prompt."""
        rotation = reference.future_rotation(
            *queries.rotary_tables, prompt_lengths, future_positions=rule.future_positions
        )
        return reference.expected_queries(queries.plain(), rotation, prompt_lengths, sinks=rule.sinks)

    @override
    def compact(
        self, observed: ExpectedQueries, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        return reference.keep_expected(
            observed, keys, values, prompt_lengths, prompt_budget=rule.prompt_budget, sinks=rule.sinks
        )

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        tables, ahead = turn.rotary_tables, rule.future_positions
        rotation = reference.future_rotation(*tables, turn.positions, future_positions=ahead)
        observed = reference.expected_queries(turn.plain_queries(), rotation, turn.new_lengths, sinks=0)
        return self.compact(observed, turn.keys, turn.values, turn.lengths, rule)

    @override
    def prompt_inputs(self, prompt: PromptLayer) -> Mapping[str, Value]:
        return _queries_ahead(EXPECTED_QUERIES, prompt, prompt.batch.lengths)

    @override
    def turn_inputs(self, turn: TurnLayer) -> Mapping[str, Value]:
        return _queries_ahead(EXPECTED_QUERIES_OF_TURN, turn, turn.emit.Add(turn.turn.positions, turn.batch.lengths))

    @override
    def least(self, rule: Constants) -> int:
        return rule.sinks + 1

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        return {**super().turn_runs(), EXPECTED_QUERIES_OF_TURN.name: _run_queries_of_turn}

    @override
    def describe(self, rule: Constants) -> str:
        return f"{rule.sinks:,} first; queries expected {rule.future_positions:,} positions ahead"

    @override
    def ranking(self, rule: Constants) -> ByExpectedQueries:
        """Return the ranking by the attention of expected queries."""
        return ByExpectedQueries(rule.sinks)

    @override
    def runs(self) -> Mapping[str, PromptRun]:
        return {**super().runs(), EXPECTED_QUERIES.name: _run_queries}

    @override
    def run_alone(self, operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
        """Run compaction with the queries expected after the case's prompts."""
        import torch

        single = reference.ExpectedQueries(*(table.float() for table in _expected(case, rule)))
        double = reference.ExpectedQueries(*(table.double() for table in single))
        inputs = {name: table for name, table in case.inputs().items() if name != "q_window"}
        results = operator.run(query_mean=single.mean.numpy(), query_covariance=single.covariance.numpy(), **inputs)
        k, v, rows = float32(case.k), float32(case.v), torch.from_numpy(case.prompt_lengths)
        exact = self.compact(double, k.double(), v.double(), rows, rule)
        tables = single.mean.numpy(), single.covariance.numpy(), case.k, case.v
        weighed = [
            ExpectedEntries(mean, covariance, keys[:, :n], values[:, :n], rule.sinks)
            for mean, covariance, keys, values, n in zip(*tables, case.prompt_lengths, strict=True)
        ]
        return self.judged(results, case, rule, exact, self.compact(single, k, v, rows, rule), weighed)


def _queries_ahead(operator: Operator, layer: PromptLayer, lengths: Value) -> dict[str, Value]:
    """Write mean and covariance of the queries expected after a text of `lengths` [B] tokens."""
    cosine, sine = _rotation_ahead(layer, lengths)
    inputs = {
        "plain_queries": layer.plain_queries(), "future_cosine": cosine, "future_sine": sine,
        "prompt_lengths": layer.batch.lengths,
    }  # fmt: skip
    return layer.call(operator, inputs, {one.name: f"{one.name}.{layer.name}" for one in operator.outputs})


def _rotation_ahead(prompt: PromptLayer, lengths: Value) -> tuple[Value, Value]:
    """Return cosine and sine of the mean rotation of the positions after `lengths` [B] tokens, FLOAT [B,D/2].

    It is that of the positions from 1 on, rotated by the last token's position, so the engine's tables need not be
    longer than its sequences, even where a text ends at the last position. A layer that does not rotate has none."""
    emit = prompt.emit
    if not prompt.rotates:
        shape = emit.Concat(emit.Shape(lengths), [prompt.config.head_size // 2], axis=0)
        return emit.Expand(np.float32(1), shape), emit.Expand(np.float32(0), shape)
    tables = rotary_tables(prompt.config, prompt.rule.future_positions + 1, longest=prompt.rule.max_sequence_len)
    ahead_of_last = (table[1:] for table in tables)
    mean_cosine, mean_sine = (table.mean(axis=0, dtype=np.float64).astype(np.float32) for table in ahead_of_last)
    last = emit.Sub(lengths, 1)
    cosine, sine = (emit.Gather(table, last) for table in prompt.batch.rotary_tables())
    ahead = emit.Sub(emit.Mul(cosine, mean_cosine), emit.Mul(sine, mean_sine))
    return ahead, emit.Add(emit.Mul(sine, mean_cosine), emit.Mul(cosine, mean_sine))


def _prompt_queries(case: PromptCase) -> Array:
    """Return plain queries [B,H,S,D]: the queries of the case's window, repeated."""
    return np.ascontiguousarray(case.q_window[:, :, np.arange(case.k.shape[2]) % case.q_window.shape[2]])


def _rotation(case: PromptCase) -> list[Array]:
    """Return a mean rotation for each row, as cosine and sine [B,D/2]."""
    half = case.k.shape[3] // 2
    angles = case.prompt_lengths[:, None] * 100.0 ** (-np.arange(half) / half)
    return [(0.7 * part(angles)).astype(np.float32) for part in (np.cos, np.sin)]


def _expected(case: PromptCase, rule: Constants) -> ExpectedQueries:
    """Return the expected queries of a case, in float64."""
    import torch

    queries, cosine, sine = (float32(table).double() for table in (_prompt_queries(case), *_rotation(case)))
    lengths = torch.from_numpy(case.prompt_lengths)
    return reference.expected_queries(queries, (cosine, sine), lengths, sinks=rule.sinks)


def _run_queries(operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
    queries, (cosine, sine) = _prompt_queries(case).swapaxes(1, 2), _rotation(case)
    inputs = {"future_cosine": cosine, "future_sine": sine, "prompt_lengths": case.prompt_lengths}
    result = operator.run(plain_queries=np.ascontiguousarray(queries), **inputs)
    needed = case.prompt_lengths.max() > rule.prompt_budget
    expected = [table.numpy() * needed for table in _expected(case, rule)]
    return Found(computed=tuple(zip(result, expected, strict=True)))


def _run_queries_of_turn(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    import torch

    prompts = case.joined(case.q.shape[2])
    cosine, sine = _rotation(prompts)
    inputs = {"future_cosine": cosine, "future_sine": sine, "prompt_lengths": case.lengths}
    result = operator.run(plain_queries=np.ascontiguousarray(case.q.swapaxes(1, 2)), **inputs)
    tables = (float32(table).double() for table in (case.q, cosine, sine))
    queries, *rotation = tables
    expected = reference.expected_queries(queries, (rotation[0], rotation[1]), torch.from_numpy(case.lengths), sinks=0)
    return Found(computed=tuple(zip(result, (table.numpy() for table in expected), strict=True)))


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive prompt budget = token budget - new tokens; a step reads all of it."""
    prompt_budget = _checked(inputs, inputs.budget - inputs.max_output_len)
    capacity = prompt_budget + inputs.max_output_len
    return _looking_ahead(
        inputs, constants(inputs, EXPECTED_ATTENTION, DENSE, capacity=capacity, prompt_budget=prompt_budget)
    )


def resolve_hybrid(inputs: PolicyInputs) -> PolicyParameters:
    """Divide the budget as RocketKV does, with its second stage."""
    capacity = cache_capacity(inputs.sequence, inputs.budget, inputs.max_output_len, inputs.split)
    prompt_budget = _checked(inputs, capacity - inputs.max_output_len)
    parameters = select_from_pages(
        inputs,
        EXPECTED_ATTENTION,
        capacity=prompt_budget + inputs.max_output_len,
        prompt_budget=prompt_budget,
        pool_kernel=1,
    )
    return _looking_ahead(inputs, parameters)


def _looking_ahead(inputs: PolicyInputs, parameters: PolicyParameters) -> PolicyParameters:
    return replace(
        parameters,
        window=inputs.max_input_len,
        sinks=min(inputs.value("sinks", SINKS), parameters.prompt_budget - 1),
        future_positions=inputs.value("future_positions", FUTURE_POSITIONS),
    )


def _checked(inputs: PolicyInputs, derived: int) -> int:
    """Return the prompt budget; InputError if it is not larger than the sinks."""
    sinks = inputs.value("sinks", SINKS)
    needed = f"{sinks + 1}: {sinks} sinks and one other"
    return checked_prompt_budget(inputs, derived, least=sinks + 1, least_is=needed, setting="sinks")


EXPECTED_ATTENTION = ExpectedAttention()
POLICY = Policy(
    name="expected-attention",
    summary="keep the prompt tokens that any question can be expected to need, then attend densely to them",
    source="Expected Attention, arXiv 2510.00636",
    eviction=EXPECTED_ATTENTION,
    selection=DENSE,
    resolve=resolve,
    overrides=("prompt_budget", "sinks", "future_positions", *EVERY_POLICY),
    candidate=True,
)
HYBRID = Policy(
    name="expected-attention-hybrid",
    summary="keep the prompt tokens that any question can be expected to need, then read the most promising of them",
    source="Expected Attention, arXiv 2510.00636, and RocketKV stage 2, arXiv 2502.14051",
    eviction=EXPECTED_ATTENTION,
    selection=BEST_OF_PAGES,
    resolve=resolve_hybrid,
    divides=True,
    overrides=("prompt_budget", "sinks", "future_positions", *SELECTION, *EVERY_POLICY),
)
