"""Cells of the study: a choice of a prompt's tokens, a choice among them at every step, and the bytes of both.

Bytes are counted in pairs: one token's key and value of one KV head. A page's bounds, its smallest and largest key,
are as many bytes as a pair. So a page of p tokens adds 1/p pair to each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvc_trt import policies
from kvc_trt.models.config import ModelConfig

FirstRule = Literal["votes", "tova", "all"]
SecondRule = Literal["all", "exact", "hybrid"]

MEMORIES = (256, 512, 1024)
"""Pairs that a KV head stores of the prompt, bounds included."""
BUDGETS = (128, 256)
"""Token budgets of the policies as they are derived: pairs that a step reads."""
OUTPUT = 64
"""Tokens of answers that policies leave room for."""


@dataclass(frozen=True)
class First:
    """Stage 1: which tokens of a prompt stay."""

    rule: FirstRule = "all"
    """votes: a list per KV head (SnapKV++); tova: the last query's, one list per layer."""
    window: int = 0
    pool: int = 1

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"{self.rule} {self.window}/{self.pool}" if self.window else self.rule


@dataclass(frozen=True)
class Second:
    """Stage 2: which tokens of those a step reads."""

    rule: SecondRule = "all"
    """hybrid: algorithm 2; exact: the best by exact attention, an oracle."""
    page: int = 1
    channels: int = 0
    read: int = 0
    """Tokens that a step attends to."""


@dataclass(frozen=True)
class Cell:
    """Both stages."""

    first: First
    kept: int
    """Tokens of the prompt that each list keeps; of shorter prompts all stay."""
    second: Second = Second()
    setting: str = ""
    """How its numbers came about: the name of a policy, or of a share to read."""
    size: int = 0
    """The pairs of memory, or the budget, that it was derived from."""

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"{self.first.name} | {self.second.rule} {self.setting} | {self.size}"

    @property
    def stored(self) -> int:
        """Pairs that a KV head stores, bounds included."""
        return self.kept + (-(-self.kept // self.second.page) if self.second.rule == "hybrid" else 0)

    def read(self, head_size: int) -> float:
        """Pairs that a step reads of them: bounds of the chosen channels, and what is attended."""
        second, pages = self.second, self.kept / self.second.page
        if second.rule == "all":
            return self.kept
        scored = self.kept if second.rule == "exact" else pages * second.channels / head_size
        return scored / 2 + second.read


WIDE, PUBLISHED = First("votes", 32, 17), First("votes", 32, 63)
"""Stage 1 with the pool that suits SmolLM2's needles, and with RocketKV's own."""
ALONE = (First("votes", 32, 7), WIDE, PUBLISHED, First("votes", 32, 511), First("votes", 8, 63), First("tova"))
"""Stage 1 alone: everything that is kept is read."""
DIVIDED, HALF, QUARTER = "divided", "half", "quarter"
"""Shares to read: RocketKV's own division at half of the kept tokens, and pages of 4 with 1/2 or 1/4 attended."""
TOGETHER = ((WIDE, HALF), (PUBLISHED, HALF), (PUBLISHED, QUARTER), (PUBLISHED, DIVIDED))


def cells(config: ModelConfig, length: int) -> list[Cell]:
    """All cells for prompts of about `length` tokens of a model."""
    found = [Cell(one, memory, size=memory) for memory in MEMORIES for one in ALONE]
    found += [_divided(first, share, memory, config.head_size) for memory in MEMORIES for first, share in TOGETHER]
    for budget in BUDGETS:
        found += _derived(config, length, budget)
    return found


def _divided(first: First, share: str, memory: int, head_size: int) -> Cell:
    """Return two stages that store `memory` pairs together.

    A budget of half the kept tokens makes pages of 2 and all channels (c = 2): a quarter of the tokens is attended."""
    page = 2 if share == DIVIDED else 4
    kept = memory * page // (page + 1)
    second = {
        DIVIDED: Second("hybrid", 2, head_size, kept // 4),
        HALF: Second("hybrid", 4, head_size // 2, kept // 2),
        QUARTER: Second("hybrid", 4, head_size // 2, kept // 4),
    }[share]
    return Cell(first, kept, second, share, memory)


def _derived(config: ModelConfig, length: int, budget: int) -> Iterator[Cell]:
    """Yield RocketKV as the policy derives it, its stages one by one, and stage 2 alone."""
    rules = {
        name: policies.resolve(name, model=config, token_budget=budget, max_input_len=length, max_output_len=OUTPUT)
        for name in ("rocketkv", "hybrid", "quest-matched")
    }
    rule = rules["rocketkv"]
    own = Second("hybrid", rule.page_size, rule.top_r, rule.top_k)
    yield Cell(PUBLISHED, rule.prompt_budget, own, "rocketkv", budget)
    yield Cell(PUBLISHED, rule.prompt_budget, Second("exact", read=rule.top_k), "rocketkv", budget)
    yield Cell(PUBLISHED, rule.prompt_budget, Second(), "rocketkv", budget)
    yield Cell(WIDE, rule.prompt_budget, own, "rocketkv", budget)
    for name in ("hybrid", "quest-matched"):
        rule = rules[name]
        yield Cell(First(), length, Second("hybrid", rule.page_size, rule.top_r, rule.top_k), name, budget)
    yield Cell(First(), length, Second("exact", read=budget), "exact-topk-group", budget)
