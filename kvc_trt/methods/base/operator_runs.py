"""How verification runs each operator of a method alone: what the kinds say, by the operator's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.discovery import objects
from kvc_trt.methods.base.prompt_eviction import PromptEviction

if TYPE_CHECKING:
    from kvc_trt.methods.base.isolated_runs import PromptRun, StepRun, TurnRun


def prompt_runs() -> Mapping[str, PromptRun]:
    """Return the isolated run of every operator of an eviction, by name."""
    kinds = objects(PromptEviction).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.runs().items()}


def turn_runs() -> Mapping[str, TurnRun]:
    """Return the isolated run of every operator that an eviction has for turns alone, by name."""
    kinds = objects(PromptEviction).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.turn_runs().items()}


def step_runs() -> Mapping[str, StepRun]:
    """Return the isolated run of every operator of a selection, by name."""
    kinds = objects(DecodeSelection).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.runs().items()}
