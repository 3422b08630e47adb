"""What each operator takes of a decode step, on both sides, at one context and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvc_trt.backends.benchmark import OperatorTime
from kvc_trt.profile.profiled_engine import DecodeRun, ProfiledEngine

STEPS = 12
"""Recorded steps; the first is left out."""


@dataclass(frozen=True)
class StepOperators:
    """The operators of one side's step."""

    side: str
    context: int
    batch: int
    operators: list[OperatorTime]

    def as_json(self) -> list[dict[str, Any]]:
        """Return one row per operator; the shares of a side add up to one."""
        total = sum(one.seconds for one in self.operators)
        return [
            {
                "context": self.context,
                "batch_size": self.batch,
                "side": self.side,
                "operator": one.name,
                "nodes": one.calls,
                "recorded_ms": 1e3 * one.seconds,
                "share": one.seconds / total,
            }
            for one in self.operators
        ]


def step_operators(sides: Sequence[ProfiledEngine], context: int, batch: int) -> list[StepOperators]:
    """Record steps of every side with synthetic caches; nothing for a backend that does not tell."""
    found = []
    for side in sides:

        def steps(executor: Any, side: ProfiledEngine = side) -> None:
            run = DecodeRun(replace(side, executor=executor), batch, context)
            for _ in range(STEPS):
                run.step_seconds()

        operators = side.benchmark.operators(side.program, steps)
        if operators is not None:
            found.append(StepOperators(side.name, context, batch, operators))
    return found
