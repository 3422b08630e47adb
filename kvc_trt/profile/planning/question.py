"""A question to `plan`, checked before anything is planned, and the call that answers it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvc_trt.config import DERIVED_NUMBERS, BuildConfig
from kvc_trt.errors import InputError
from kvc_trt.profile.accelerators import HOPPER, accelerator
from kvc_trt.profile.planning.comparison import OF_ALL_POLICIES
from kvc_trt.profile.planning.limit import Limit
from kvc_trt.profile.planning.request import PlanRequest, resolve_comparison, resolve_limit, resolve_plan


@dataclass(frozen=True)
class PlanQuestion:
    """A question to `plan`: one engine, all policies at a budget, or the budgets that fit a memory."""

    gpus: tuple[str, ...] = ()
    """Names, or NAME=bandwidth,TFLOPS,GiB; empty: H100 and H200."""
    compare: bool = False
    """True to compare all policies at one budget."""
    memory: int | None = None
    """Bytes for the caches of `rows` rows."""
    rows: int | None = None
    """Rows that share `memory`; without `memory`, the rows that must fit each GPU."""
    mix: Path | None = None
    """The file that lists requests of several lengths (`read_mix`)."""
    network: float | None = None
    """Bytes per second between prefill and decode on different machines; None: they share one."""

    @property
    def limited(self) -> bool:
        """True if the question is for the largest budgets that fit."""
        return self.memory is not None or self.rows is not None

    @property
    def limit_option(self) -> str:
        """The command-line option that limits the budgets, for messages."""
        return "--rows" if self.memory is None else "--memory"

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise InputError for questions that exclude each other, and for settings that the answer would ignore."""
        if self.rows is not None and self.rows < 1:
            raise InputError(f"rows: expected at least 1, found {self.rows}")
        limit = self.limit_option
        whole = "--compare" if self.compare else limit if self.limited else None
        if whole is None:
            return
        others = {
            limit: self.compare and self.limited,
            "--mix": self.mix is not None,
            "--disaggregated": self.network is not None,
            "--token-budget": self.limited and "token_budget" in settings,
            "--tp": self.compare and "tensor_parallel" in settings,
        }
        for option, given in others.items():
            if given:
                raise InputError(f"{whole} and {option} exclude each other", hint=f"leave out {option}")
        if self.compare:
            _refuse_overrides(settings, whole)


def answered(config: BuildConfig, question: PlanQuestion) -> dict[str, Any]:
    """Return the answer as JSON-compatible data; InputError for settings that a build would refuse."""
    gpus = tuple(dict.fromkeys(map(accelerator, question.gpus))) or HOPPER
    request = PlanRequest(config, gpus, question.network, question.mix)
    if question.compare:
        return resolve_comparison(config)
    if question.limited:
        if "policy" not in config.model_fields_set:
            _refuse_overrides(config.model_fields_set, question.limit_option)
        return resolve_limit(request, Limit(question.memory, question.rows or 1))
    return resolve_plan(request)


def _refuse_overrides(settings: Iterable[str], option: str) -> None:
    """Raise InputError for a setting of a single policy; the tables of `option` derive these from the budget."""
    for name in settings:
        if name in (*DERIVED_NUMBERS, "dense_until") and name not in OF_ALL_POLICIES:
            raise InputError(
                f"--set {name}: {option} shows every policy as it is derived from the budget",
                hint=f"leave out {option} to set it for one --policy",
            )
