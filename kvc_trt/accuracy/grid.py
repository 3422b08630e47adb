"""The grid of a comparison: policies x token budgets, each asked groups of questions (task, context length, mode)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvc_trt import policies
from kvc_trt.config import parse_settings
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.policies import BASELINE
from kvc_trt.tasks.registry import all_tasks, task
from kvc_trt.tasks.task import Task

MODES = ("query-aware", "query-agnostic")
"""The place of the question: at the end of the prompt, so that compaction sees it, or fed through decode afterwards."""
SECOND_QUESTION = "second-question"
"""The question comes as a turn, after another one was answered. Of tasks that ask twice, where it is named."""
STORED_CONTEXT = "stored-context"
"""The question comes as a turn right after the compacted context: what a shared prefix or a stored context is asked.
Where it is named."""
ALL_MODES = (*MODES, SECOND_QUESTION, STORED_CONTEXT)
PLAIN, CHAT = FRAMINGS = ("plain", "chat")
"""A question as plain text, or as a user's message through the model's chat template."""
DEFAULT_TASKS = ("niah-single-1", "niah-multikey-2", "niah-multivalue", "niah-multiquery", "lines")
"""The families that a shipped model learns."""
SHORTEST = 256
"""Tokens of the shortest questions asked where no length is given."""


@dataclass(frozen=True)
class Variant:
    """One policy at one token budget; None is a policy without one (full), or with one of its own settings."""

    policy: str
    """A policy, with settings of its own after colons: `hybrid:page_size=16`."""
    token_budget: int | None

    @classmethod
    def of(cls, policy: str, token_budget: int | None) -> Variant:
        """Return the variant of a policy at this budget, which a policy that keeps everything does not have.

        Nor has one whose settings name a budget, in percent for example: `streaming-llm:token_budget=20%`."""
        found = cls(policy, token_budget)
        own = any(one.startswith("token_budget=") for one in policy.split(":")[1:])
        return cls(policy, None) if found.name == BASELINE or own else found

    @property
    def name(self) -> str:
        """The policy's name in the registry."""
        return self.policy.partition(":")[0]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings after the name, as `--set` reads them."""
        return parse_settings(self.policy.split(":")[1:])

    def __str__(self) -> str:
        return self.policy if self.token_budget is None else f"{self.policy} {self.token_budget}"


@dataclass(frozen=True)
class QuestionGroup:
    """One group of questions; every variant is asked the same ones."""

    task: str
    mode: str
    """One of ALL_MODES."""
    length: int
    """Tokens of prompt and answer together."""
    framing: str = PLAIN
    """One of FRAMINGS."""

    def __str__(self) -> str:
        framed = "" if self.framing == PLAIN else f", {self.framing}"
        return f"{self.task}, {self.length} tokens, {self.mode}{framed}"


def variants(names: Sequence[str], budgets: Sequence[int]) -> list[Variant]:
    """Full once and first, then every other policy at every budget. `full:kv_cache=int8` has no budget either.

    InputError for a name that is no policy, and for settings that no policy has.
    """
    known = [one.name for one in policies.describe()]
    chosen: list[Variant] = [Variant(BASELINE, None)]
    for name in dict.fromkeys(names):
        if (bare := name.partition(":")[0]) not in known:
            raise InputError(f"unknown policy {bare!r}{did_you_mean(bare, known)}", hint="kvc-trt policies lists them")
        others = [one for one in Variant(name, None).settings if one != "kv_cache"]
        if bare == BASELINE and others:
            raise InputError(f"{name}: {BASELINE} is the baseline of the comparison, and takes no {others[0]}")
        chosen += [Variant.of(name, budget) for budget in sorted(set(budgets))]
    return list(dict.fromkeys(chosen))


def question_groups(
    tasks: Sequence[str | Task], lengths: Sequence[int], modes: Sequence[str], framings: Sequence[str] = (PLAIN,)
) -> list[QuestionGroup]:
    """Every task at every length in every mode and framing, short ones first. InputError for unknown names.

    A task that is not registered, a set of a file, is given itself.
    """
    by_name = {one.name: one for one in (task(one) if isinstance(one, str) else one for one in tasks)}
    chosen, names = list(by_name.values()), list(by_name)
    ordered_modes, ordered_framings = _known("mode", modes, ALL_MODES), _known("framing", framings, FRAMINGS)
    if SECOND_QUESTION in ordered_modes and (once := [one.name for one in chosen if not one.asks_twice]):
        twice = ", ".join(one.name for one in all_tasks().values() if one.asks_twice)
        raise InputError(f"task {once[0]} asks one question, and mode {SECOND_QUESTION} two", hint=f"tasks: {twice}")
    if STORED_CONTEXT in ordered_modes and (
        other := [one.name for one in chosen if one.score is None or one.reads != "text"]
    ):
        raise InputError(f"task {other[0]} is not answered in words, as mode {STORED_CONTEXT} needs")
    return [
        QuestionGroup(name, mode, length, framing)
        for length in sorted(set(lengths))
        for name in names
        for framing in ordered_framings
        for mode in ordered_modes
    ]


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names in the order of the known ones. InputError for another name."""
    for name in names:
        if name not in known:
            raise InputError(f"unknown {what} {name!r}{did_you_mean(name, known)}", hint=f"{what}s: {', '.join(known)}")
    return [name for name in known if name in names]


def file_name(text: str) -> str:
    """Text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def policies_of(names: Sequence[str] | None) -> list[str]:
    """The named policies; all registered ones where none is named."""
    return list(names) if names is not None else [one.name for one in policies.describe()]


def budgets_of(model: str) -> tuple[int, ...]:
    """The model's own token budget, twice and four times as many."""
    budget = int(choose_model(model).defaults["token_budget"])
    return budget, 2 * budget, 4 * budget


def longest_of(model: str) -> int:
    """Tokens of the longest questions a model is asked."""
    return int(choose_model(model).defaults["max_input_len"])


def grid_for(
    longest: int,
    tasks: Sequence[str] | None,
    lengths: Sequence[int] | None,
    modes: Sequence[str] | None,
    framing: str = PLAIN,
) -> list[QuestionGroup]:
    """The groups of questions; lengths are `longest`, a half and a quarter of it where none are given."""
    own = [longest // part for part in (4, 2, 1) if longest // part >= min(SHORTEST, longest)]
    return question_groups(tasks or DEFAULT_TASKS, lengths or own, modes or MODES, (framing,))
