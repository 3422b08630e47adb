"""What `benchmarks.accuracy_smollm2` asks: stages of a grid, in the order in which they decide something."""

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
    """Beside the whole cache; none asks that alone."""
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
        """Whether kvpress is asked the same questions: those that RocketKV is asked."""
        return ROCKETKV in self.policies

    def hours(self) -> tuple[float, float]:
        """Of one core: what our engines and kvpress take, as far as is known beforehand."""
        ours = sum(
            self.asked * (WHOLE_SECONDS[group.length] + POLICY_SECONDS[group.length] * (len(self.variants) - 1))
            for group in self.groups
        )
        theirs = sum(self.asked * KVPRESS_SECONDS[group.length] for group in self.groups) if self.beside_kvpress else 0
        return ours / 3600, theirs / 3600


WHOLE_SECONDS = {2048: 5.5, 4096: 14.0, 8192: 42.0}
"""Processor seconds of a question's prefill, by its length; like the next two, of one core of an AMD EPYC (Zen 5),
measured at 2,048 tokens and estimated from that at more."""
POLICY_SECONDS = {2048: 0.45, 4096: 0.7, 8192: 1.2}
"""Of one policy's answer at one budget."""
KVPRESS_SECONDS = {2048: 30.0, 4096: 65.0, 8192: 150.0}
"""Of a question that all presses answer at every point."""

FOUND = ("niah-single-1", "niah-single-2-prose", "niah-multikey-1-prose")
HARD = ("niah-multikey-2", "niah-multivalue", "niah-multiquery", "variable-tracking", "lines")
AWARE, LATE = MODES[:1], MODES[1:]
CORE = {
    "needles": Stage(FOUND[:1], modes=AWARE),
    "pools": Stage(FOUND[:1], policies=POOLS, modes=AWARE, asked=16),
    "late-needles": Stage(FOUND[:1], modes=LATE),
    "answered": Stage((*FOUND, *HARD), policies=(), modes=AWARE, asked=16),
    "needles-4k": Stage(FOUND[:1], (4096,), modes=AWARE),
    "keys-and-lines": Stage(("niah-multikey-2", "lines", "variable-tracking"), modes=AWARE),
    "likelihood": Stage(("log-summary",), modes=AWARE),
    "plain": Stage(FOUND[:2], framings=(PLAIN,), modes=AWARE),
    "late-likelihood": Stage(("log-summary",), modes=LATE),
    "answered-long": Stage((*FOUND, *HARD), (4096, 8192), policies=(), modes=AWARE, asked=8),
    "needles-in-prose": Stage(FOUND[1:], modes=AWARE),
}
"""At most eight hours on two cores: our engines take one of them, kvpress the other."""
REST = {
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
    """How long the stages take where nothing is known yet, a line each and all together."""
    lines, all_ours, all_theirs = [], 0.0, 0.0
    for name in names:
        ours, theirs = STAGES[name].hours()
        all_ours, all_theirs = all_ours + ours, all_theirs + theirs
        lines.append(f"{name}: {ours:.1f} h of our engines, {theirs:.1f} h of kvpress")
    lines.append(f"together, a core each: {max(all_ours, all_theirs):.1f} h ({all_ours:.1f} and {all_theirs:.1f})")
    return "\n".join(lines)
