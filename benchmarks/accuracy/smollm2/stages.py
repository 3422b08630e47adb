"""The stages of `benchmarks.accuracy.smollm2.grid`, in the order in which they decide something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvc_trt import policies
from kvc_trt.accuracy.grid import CHAT, MODES, PLAIN, QuestionGroup, Variant, question_groups, variants

BUDGETS = (128, 256, 512)
SAMPLES = 64
"""Questions of a group that decides something; the same ones are drawn for every stage."""
ROCKETKV = "rocketkv"
WIDE_POOL = "snapkv-gqa:pool_kernel=17"
"""SnapKV with a pool that carries a vote over a blank and seven digits; the paper's own, 7, carries it over three."""
CLAIMED = (
    ROCKETKV, "snapkv++", "hybrid", "snapkv", "snapkv-gqa", "streaming-llm", "tova", "expected-attention",
    "expected-attention-hybrid", WIDE_POOL,
)  # fmt: skip
LEFT_OUT = ("snapkv", "expected-attention-hybrid")
"""Asked of the first two groups, and answering next to nothing there. `snapkv-gqa` and `expected-attention` stay: they
select as these do, and kvpress has presses beside them."""
LATER = tuple(name for name in CLAIMED if name not in LEFT_OUT)
OTHERS = tuple(
    one.name for one in policies.describe() if one.name not in CLAIMED and not policies.named(one.name).selection.oracle
)
POOLS = tuple(
    f"snapkv-gqa:{changed}"
    for changed in ("pool_kernel=31", "pool_kernel=63", "window=1", "window=8", "window=8:pool_kernel=17")
)
"""SnapKV with one thing changed, or two: what its answers to needles depend on."""


@dataclass(frozen=True)
class Stage:
    """A part of the grid that is measured before the next one."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (2048,)
    framings: tuple[str, ...] = (CHAT,)
    policies: tuple[str, ...] = CLAIMED
    """Policies beside the whole cache; with none, it is asked alone."""
    modes: tuple[str, ...] = MODES
    asked: int = SAMPLES

    @property
    def groups(self) -> list[QuestionGroup]:
        """The groups of questions."""
        return question_groups(self.tasks, self.lengths, self.modes, self.framings)

    @property
    def variants(self) -> list[Variant]:
        """The full cache first."""
        return variants(self.policies, BUDGETS)

    @property
    def beside_kvpress(self) -> bool:
        """True if kvpress is asked the same questions: those that RocketKV is asked."""
        return ROCKETKV in self.policies

    def hours(self) -> tuple[float, float]:
        """Return the estimated hours of one core that our engines and kvpress take."""
        ours = theirs = 0.0
        for group in self.groups:
            steps = LONGEST_ANSWERS[group.task] + (LATE_TOKENS if group.mode != MODES[0] else 0)
            policy = HEAD_SECONDS[group.length] + STEP_SECONDS * steps
            ours += self.asked * (WHOLE_SECONDS[group.length] + policy * len(self.variants))
            if self.beside_kvpress:
                theirs += self.asked * (PRESSES_SECONDS[group.length] + PRESSES_STEP_SECONDS * steps)
        return ours / 3600, theirs / 3600


LONGEST_ANSWERS = {
    "niah-single-1": 12, "niah-single-2-prose": 12, "niah-multikey-1-prose": 12, "niah-multikey-2": 12, "lines": 12,
    "niah-multivalue": 48, "niah-multiquery": 48, "variable-tracking": 32, "log-summary": 64,
}  # fmt: skip
"""Tokens that the model needs to answer: policies that evict spend their budget on the answer's room too."""
LATE_TOKENS = 25
"""Tokens of a question that is fed after compaction, roughly."""
WHOLE_SECONDS = {2048: 4.0, 4096: 10.0, 8192: 30.0}
"""Processor seconds of a question's prefill, by its length; like those below, of one core of an AMD EPYC (Zen 5)."""
HEAD_SECONDS = {2048: 0.15, 4096: 0.3, 8192: 0.6}
"""Processor seconds that one policy at one budget spends on a prefilled question, by its length."""
STEP_SECONDS = 0.008
"""Processor seconds of a token that one policy at one budget reads or answers."""
PRESSES_SECONDS = {2048: 9.0, 4096: 20.0, 8192: 55.0}
"""Processor seconds of a question's prefill in transformers and of all presses at every point, by its length."""
PRESSES_STEP_SECONDS = 0.2
"""Processor seconds of a token that all presses at every point read or answer."""

FOUND = ("niah-single-1", "niah-single-2-prose", "niah-multikey-1-prose")
HARD = ("niah-multikey-2", "niah-multivalue", "niah-multiquery", "variable-tracking", "lines")
AWARE, LATE = MODES[:1], MODES[1:]
CORE = {
    "needles": Stage(FOUND[:1], modes=AWARE),
    "pools": Stage(FOUND[:1], policies=POOLS, modes=AWARE, asked=16),
    "answered": Stage((*FOUND, *HARD), policies=(), modes=AWARE, asked=16),
    "late-needles": Stage(FOUND[:1], modes=LATE),
    "likelihood": Stage(("log-summary",), policies=LATER, modes=AWARE),
    "needles-4k": Stage(FOUND[:1], (4096,), policies=LATER, modes=AWARE),
    "plain": Stage(FOUND[:1], framings=(PLAIN,), policies=LATER, modes=AWARE),
    "keys": Stage(FOUND[2:], policies=LATER, modes=AWARE),
    "answered-plain": Stage((*FOUND, *HARD), framings=(PLAIN,), policies=(), modes=AWARE, asked=16),
    "answered-long": Stage((*FOUND, *HARD), (4096,), policies=(), modes=AWARE, asked=8),
    "answered-8k": Stage(FOUND[:1], (8192,), policies=(), modes=AWARE, asked=8),
}
"""The smallest grid that every claim of the page needs. What the whole cache answers is asked before what policies make
of it: with 16 questions each it answers none of `lines`, 2 % of `variable-tracking` and 12 % of `niah-multikey-2`, so
that these tell nothing of a policy. Our engines take one core, kvpress another."""
REST = {
    "late-likelihood": Stage(("log-summary",), policies=LATER, modes=LATE),
    "needles-in-prose": Stage(FOUND[1:], modes=AWARE),
    "several-needles": Stage(("niah-multivalue", "niah-multiquery"), modes=AWARE),
    "other-policies": Stage(FOUND[:1], policies=OTHERS),
    "plain-rest": Stage((*FOUND, *HARD, "log-summary"), framings=(PLAIN,)),
    "needles-4k-rest": Stage(FOUND, (4096,)),
    "tasks-rest": Stage((*FOUND[1:], *HARD, "log-summary"), (2048, 4096)),
    "other-policies-rest": Stage((*FOUND, *HARD, "log-summary"), (2048, 4096), policies=OTHERS),
    "needles-8k": Stage(FOUND, (8192,)),
}
STAGES = {**CORE, **REST}


def estimate(names: Sequence[str]) -> str:
    """Return the estimated hours of stages that have no answers yet: a line for each, and the sum."""
    lines, all_ours, all_theirs = [], 0.0, 0.0
    for name in names:
        ours, theirs = STAGES[name].hours()
        all_ours, all_theirs = all_ours + ours, all_theirs + theirs
        lines.append(f"{name}: {ours:.1f} h of our engines, {theirs:.1f} h of kvpress")
    lines.append(f"together, a core each: {max(all_ours, all_theirs):.1f} h ({all_ours:.1f} and {all_theirs:.1f})")
    return "\n".join(lines)
