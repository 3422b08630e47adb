"""DuoAttention: a few retrieval heads keep every token, the others only sinks and recent ones.

"DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", arXiv 2410.10819, with the
accounting of RocketKV's appendix (arXiv 2502.14051, A.3). Which KV heads retrieve is a pattern learnt for one model: a
score in 0..1 for each (layer, KV head). The best F of all heads, by (score, layer, head), keep everything.

Shapes: a layer may hold two caches, [B,F_l,S,D] and [B,G-F_l,sinks+recent,D]. The budget is a mean over heads: t > 640
gives 128 sinks, 512 recent tokens and F = floor((t - 640) / (S - 640) of all heads); smaller budgets give no retrieval
head and need no pattern. Deviations: ties go to the lower layer and head (published: to noise); prefill attention is
exact for every head, also for streaming heads.

A turn of a conversation is appended in retrieval heads; in streaming heads the first and the last tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvc_trt.errors import InputError
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.streaming_llm import FIRST_AND_LAST, RING, keep_recent
from kvc_trt.models.config import ModelConfig

SINKS, RECENT = 128, 512


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive the sinks and recent tokens of streaming heads, and which heads retrieve."""
    model, (sinks, recent) = inputs.model, _streaming(inputs)
    every = {name: value for name, value in inputs.overrides.items() if name in EVERY_POLICY}
    own = replace(inputs, token_budget=sinks + recent, overrides={**every, "recent": recent})
    streaming = keep_recent(own, sinks)
    scores = inputs.choice("head_scores", None)
    if scores is not None:
        _check_pattern(scores, model)
    heads = model.num_hidden_layers * model.num_key_value_heads
    count = _retrieval_heads(inputs, sinks + recent, heads)
    skipped = inputs.value("skip_layers", 0)
    if not count:
        return replace(streaming, token_budget=inputs.budget, skip_layers=skipped)
    if scores is None and count < heads:
        raise InputError(
            f"policy {inputs.policy} gives {count} heads the whole cache at a token budget of {inputs.budget}; "
            "expected a pattern that says which",
            hint=f"--set head_pattern=FILE.tsv, or --token-budget {sinks + recent} for none",
        )
    chosen = best_heads(scores or [[0.0] * model.num_key_value_heads] * model.num_hidden_layers, count)
    return replace(streaming, token_budget=inputs.budget, skip_layers=skipped, retrieval_heads=chosen)


def best_heads(scores: Sequence[Sequence[float]], count: int) -> tuple[tuple[bool, ...], ...]:
    """Return the `count` best heads by (score descending, layer, head), as a table of layers and KV heads."""
    places = [(-score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)]
    best = {place[1:] for place in sorted(places)[:count]}
    return tuple(tuple((layer, head) in best for head in range(len(row))) for layer, row in enumerate(scores))


def _streaming(inputs: PolicyInputs) -> tuple[int, int]:
    """Return the sinks and recent tokens of a streaming head."""
    budget = inputs.budget
    if budget > SINKS + RECENT:
        sinks, recent = inputs.value("sinks", SINKS), inputs.value("recent", RECENT)
    else:
        sinks = inputs.value("sinks", SINKS if budget > 2 * SINKS else budget // 5)
        recent = inputs.value("recent", max(1, budget - sinks))
    if sinks + recent > budget:
        raise InputError(
            f"the token budget is {budget}; expected at least {sinks + recent}: {sinks} sinks and {recent} recent",
            hint=f"--token-budget {sinks + recent}",
        )
    return sinks, recent


def _retrieval_heads(inputs: PolicyInputs, streaming: int, heads: int) -> int:
    """Return F, how many of `heads` keep everything so that the mean over all heads is about the budget."""
    if inputs.budget <= streaming:
        return 0
    if inputs.sequence <= inputs.budget:
        return heads
    return int((inputs.budget - streaming) / (inputs.sequence - streaming) * heads)


def _check_pattern(scores: Sequence[Sequence[float]], model: ModelConfig) -> None:
    layers, heads = model.num_hidden_layers, model.num_key_value_heads
    if len(scores) != layers or any(len(row) != heads for row in scores):
        found = f"{len(scores)} rows of {sorted({len(row) for row in scores})} scores"
        raise InputError(f"head pattern: {found}; expected {layers} layers of {heads} KV heads")
    wrong = next((s for row in scores for s in row if isinstance(s, bool) or not 0 <= s <= 1), None)
    if wrong is not None:
        raise InputError(f"head pattern: a score is {wrong!r}; expected numbers in 0..1")


DUO_ATTENTION = Policy(
    name="duo-attention",
    summary="retrieval heads keep every token, streaming heads the first and the last ones",
    source="DuoAttention, arXiv 2410.10819",
    eviction=FIRST_AND_LAST,
    selection=RING,
    resolve=resolve,
    overrides=("sinks", "recent", "head_scores", *EVERY_POLICY),
    turn="Retrieval heads append the turn, and it is refused if they have no free slots; in the other heads the first "
    "tokens of the conversation and its last ones stay.",
)
