"""What is measured where the user does not say."""

from __future__ import annotations

from collections.abc import Sequence

from kvc_trt import policies
from kvc_trt.accuracy.grid import MODES, Group, groups

TASKS = ("niah-single-1", "niah-multikey-2", "niah-multivalue", "niah-multiquery", "lines")
"""The families that a shipped model learns."""
SHORTEST = 256


def policies_of(names: Sequence[str] | None) -> list[str]:
    """The named policies; all of the registry where none is named."""
    return list(names) if names is not None else [one.name for one in policies.describe()]


def budgets_of(model: str) -> tuple[int, ...]:
    """The model's own token budget, twice and four times as many."""
    from kvc_trt.engine.model_choice import choose_model

    budget = int(choose_model(model).defaults["token_budget"])
    return budget, 2 * budget, 4 * budget


def longest_of(model: str) -> int:
    """Tokens of the longest questions a model is asked."""
    from kvc_trt.engine.model_choice import choose_model

    return int(choose_model(model).defaults["max_input_len"])


def grid_for(
    longest: int, tasks: Sequence[str] | None, lengths: Sequence[int] | None, modes: Sequence[str] | None
) -> list[Group]:
    """The groups of questions; lengths are `longest`, a half and a quarter of it where none are given."""
    own = [longest // part for part in (4, 2, 1) if longest // part >= min(SHORTEST, longest)]
    return groups(tasks or TASKS, lengths or own, modes or MODES)
