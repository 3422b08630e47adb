"""Cells of the study: a choice of a prompt's tokens, a choice among them at every step, and the bytes of both.

Bytes are counted in pairs: one token's key and value of one KV head. A page's bounds, its smallest and largest key,
are as many bytes as a pair. So a page of p tokens adds 1/p pair to each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvc_trt import policies
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig

FirstRule = Literal["votes", "tova", "all"]
SecondRule = Literal["all", "exact", "hybrid", "sparq"]

MEMORIES = (256, 512, 1024)
"""Pairs that a KV head stores of the prompt, bounds included."""
BUDGETS = (128, 256)
"""Token budgets of the policies as they are derived: pairs that a step reads."""
OUTPUT = 64
"""Tokens of answers that policies leave room for."""
LONGEST = 8064
"""Tokens of the longest prompt of an engine that also gets shorter ones."""
RECENT = 4
"""Last tokens that a step of a cell *recent* reads in any case: at least a page of most settings."""


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
    """hybrid: algorithm 2; sparq: every key on some channels; exact: the best by exact attention, an oracle."""
    page: int = 1
    channels: int = 0
    read: int = 0
    """Tokens that a step attends to."""
    recent: int = 0
    """Last tokens that every step reads, its own among them; `read` counts them."""


@dataclass(frozen=True)
class Cell:
    """Both stages."""

    first: First
    kept: int
    """Tokens of the prompt that each list keeps; of shorter prompts all stay."""
    second: Second = Second()
    setting: str = ""
    """The source of its numbers: the name of a policy, or of a share to read."""
    size: int = 0
    """The pairs of memory, or the budget, that it was derived from."""

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"{self.first.name} | {self.second.rule} {self.setting} | {self.size}"

    @property
    def stored(self) -> int:
        """Pairs that a KV head stores, bounds included, or SparQ's second copy of the keys."""
        beside = {"hybrid": -(-self.kept // self.second.page), "sparq": -(-self.kept // 2)}
        return self.kept + beside.get(self.second.rule, 0)

    def read(self, head_size: int) -> float:
        """Pairs that a step reads of them: bounds of the chosen channels, and the tokens attended to."""
        second, pages = self.second, self.kept / self.second.page
        if second.rule == "all":
            return self.kept
        scored = self.kept if second.rule == "exact" else pages * second.channels / head_size
        mean_value = 0.5 if second.rule == "sparq" else 0
        return scored / 2 + mean_value + second.read


WIDE, PUBLISHED = First("votes", 32, 17), First("votes", 32, 63)
"""Stage 1 with the pool that suits SmolLM2's needles, and with RocketKV's own."""
ALONE = (First("votes", 32, 7), WIDE, PUBLISHED, First("votes", 32, 511), First("votes", 8, 63), First("tova"))
"""Stage 1 alone: everything that is kept is read."""
DIVIDED, HALF, QUARTER = "divided", "half", "quarter"
"""Shares to read: RocketKV's own division at half of the kept tokens, and pages of 4 with 1/2 or 1/4 attended."""
TOGETHER = ((WIDE, HALF), (PUBLISHED, HALF), (PUBLISHED, QUARTER), (PUBLISHED, DIVIDED))


def cells(config: ModelConfig, length: int) -> list[Cell]:
    """Return all cells for prompts of about `length` tokens of a model."""
    found = [Cell(one, memory, size=memory) for memory in MEMORIES for one in ALONE]
    for memory in MEMORIES:
        found += [divided(first, share, memory, config.head_size) for first, share in TOGETHER]
        found.append(recent(divided(PUBLISHED, HALF, memory, config.head_size)))
    for budget in BUDGETS:
        found += derived_cells(config, length, budget, PUBLISHED, WIDE)
    return [*found, *_for_longer(config, length, AT_LENGTHS)]


def recent(cell: Cell) -> Cell:
    """Return the cell whose steps read their own token and more of the last ones in any case."""
    return replace(cell, second=replace(cell.second, recent=RECENT), setting=f"{cell.setting}, recent {RECENT}")


def divided(first: First, share: str, memory: int, head_size: int) -> Cell:
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


def derived_cells(config: ModelConfig, length: int, budget: int, first: First, other: First) -> Iterator[Cell]:
    """Yield RocketKV as the policies derive it with stage 1 `first`, its stages one by one, its stage 2 behind an
    `other` stage 1, and ways to select alone."""
    resolved = partial(policies.resolve, model=config, token_budget=budget, max_output_len=OUTPUT, max_input_len=length)
    rule = resolved(ADAPTIVE)
    own = Cell(first, rule.prompt_budget, _by_pages(rule), ADAPTIVE, budget)
    yield own
    yield recent(own)
    yield replace(own, second=Second("exact", read=rule.top_k))
    yield replace(own, second=Second())
    yield replace(own, first=other)
    rule = resolved(EVEN)
    yield Cell(first, rule.prompt_budget, _by_pages(rule), EVEN, budget)
    for name in ("hybrid", "quest-matched"):
        selecting = Cell(First(), length, _by_pages(resolved(name)), name, budget)
        yield selecting
        yield recent(selecting)
    rule = resolved("sparq")
    # Its own token is read beside `top_k` others.
    yield Cell(First(), length, Second("sparq", channels=rule.top_r, read=rule.top_k + 1, recent=1), "sparq", budget)
    yield Cell(First(), length, Second("exact", read=budget), "exact-topk-group", budget)


def _for_longer(config: ModelConfig, length: int, budget: int) -> Iterator[Cell]:
    """Yield what an engine for longer prompts does with one of `length` tokens: by its length, or as with the longest
    prompt."""
    longest = max(length, min(LONGEST, config.max_position_embeddings - OUTPUT))
    for name in (ADAPTIVE, EVEN):
        for by_length in (True, False):
            rule = policies.resolve(
                name, model=config, token_budget=budget, max_output_len=OUTPUT, max_input_len=longest,
                by_length=by_length,
            )  # fmt: skip
            setting = f"{name}, {BY_LENGTH if by_length else ALIKE}"
            yield Cell(PUBLISHED, min(length, rule.kept_of(length)), _by_pages(rule), setting, budget)


ADAPTIVE, EVEN = "rocketkv", "rocketkv-v1"
"""The policies of the two divisions."""
AT_LENGTHS = 256
"""The budget at which an engine for longer prompts is measured."""
BY_LENGTH, ALIKE = "by length", "all alike"
"""Settings of an engine for longer prompts: what it keeps of a shorter one."""


def _by_pages(rule: PolicyParameters) -> Second:
    return Second("hybrid", rule.page_size, rule.top_r, rule.top_k)
