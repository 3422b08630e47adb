"""The bars of `kvc-trt verify`, which every report records, and which are never moved for one engine or one machine.

Indices have no bar: they are equal, or proven near-ties. Figures of the compression itself (the policy's loss against
the full cache) have none either: they are a property of the chosen budget, and are reported beside the engine's error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from kvc_trt.backends.run_options import PrefillPrecision


@dataclass(frozen=True)
class Thresholds:
    """Bars for one kind of weights: the engine against the reference under the same policy and the same weights."""

    value_error: float
    """Operator outputs: the largest absolute error, divided by the largest reference value (at least 1); for bfloat16
    outputs the error before they were rounded (`array_errors.differences`)."""
    prompt_error: float
    """The largest error of attention over a prompt, on inputs of the type in which prefill computes."""
    logits_max_error: float
    """Teacher-forced logits: the largest absolute error, divided by the largest reference logit (at least 1)."""
    logits_mean_kl: float
    """Mean KL divergence of the engine's next-token distribution from the reference's, in nats."""
    near_equal_logits: float
    """Two logits this close may change places: such top-1 differences are counted as exceptions, not as errors."""
    choice_slack: float | None
    """A choice that differs from the reference's counts as rounding within this multiple of a near-tie's tolerance,
    because its inputs include the rounding of earlier layers. (On equal inputs, on which operators are judged, the
    multiple is 1; on the exposed inputs of an engine's steps, it is `FLOAT32_SLACK`.) None: inputs differ too much to
    judge, and choices are judged on equal inputs alone."""
    unexplained_tokens: int
    """The number of greedy or top-1 tokens that may differ although neither logits nor choices nearly tie."""
    unexplained_answers: float
    """The share of retrieval answers that may differ from the reference's although their logits do not nearly tie. Not
    0: a choice at a near-tie, which other rungs prove, may cost an answer that this rung does not trace back to it."""

    def to_json(self) -> dict[str, float | None]:
        """Return the bars by name."""
        return asdict(self)


FLOAT32_SLACK = 32.0
"""The multiple of a near-tie's tolerance if only float32 operations round."""

_SINGLE = Thresholds(
    value_error=1e-5,
    prompt_error=1e-5,
    logits_max_error=1e-4,
    logits_mean_kl=1e-6,
    near_equal_logits=1e-3,
    choice_slack=FLOAT32_SLACK,
    unexplained_tokens=0,
    unexplained_answers=0.05,
)
_HALF = Thresholds(
    value_error=2e-3,
    prompt_error=2e-3,
    logits_max_error=2e-2,
    logits_mean_kl=1e-3,
    near_equal_logits=5e-2,
    choice_slack=4096.0,
    unexplained_tokens=0,
    unexplained_answers=0.15,
)
_BFLOAT16 = Thresholds(
    value_error=2e-3,
    prompt_error=2e-3,
    logits_max_error=0.16,
    logits_mean_kl=1e-2,
    near_equal_logits=0.4,
    choice_slack=None,
    unexplained_tokens=0,
    unexplained_answers=0.15,
)
_QUANTISED = Thresholds(
    value_error=1e-5,
    prompt_error=1e-5,
    logits_max_error=1e-1,
    logits_mean_kl=1e-2,
    near_equal_logits=0.3,
    choice_slack=None,
    unexplained_tokens=0,
    unexplained_answers=0.15,
)

_BY_WEIGHTS = {
    "fp32": _SINGLE,
    "fp16": _HALF,
    "bf16": _BFLOAT16,
    "fp8": _BFLOAT16,
    "int8": _QUANTISED,
    "int4": _QUANTISED,
    "keep": _QUANTISED,
}


def thresholds_for(weights: str, prefill: PrefillPrecision = "f32") -> Thresholds:
    """Return the bars of an engine whose weights are fp32, fp16, bf16, fp8, int8, int4 or kept blocks.

    bf16 rounds eight times as coarsely as fp16, including the inputs of operators: operators are held to fp16's bar
    before their result is rounded, logits to eight times fp16's, choices on equal inputs alone (docs/decisions/0012).

    An engine in fp8 computes in bf16, and the reference reads its matrices as they are multiplied: dequantised to bf16.

    int8 and int4 engines round activations to int8 before products (MatMulNBits, accuracy level 4), and the reference
    does not: their operators are held to float32's bars, their logits to wider ones. The error by the weights' own
    rounding is reported in another column.

    If `prefill` computes in bf16, attention over the prompt and all that follows from it are held to bf16's bars.
    """
    bars = _BY_WEIGHTS[weights]
    if prefill == "f32":
        return bars
    return replace(
        bars,
        prompt_error=max(bars.prompt_error, _BFLOAT16.prompt_error),
        logits_max_error=max(bars.logits_max_error, _BFLOAT16.logits_max_error),
        logits_mean_kl=max(bars.logits_mean_kl, _BFLOAT16.logits_mean_kl),
        near_equal_logits=max(bars.near_equal_logits, _BFLOAT16.near_equal_logits),
        choice_slack=_BFLOAT16.choice_slack,
        unexplained_answers=max(bars.unexplained_answers, _BFLOAT16.unexplained_answers),
    )
