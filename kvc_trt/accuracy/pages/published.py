"""Published results beside a measurement, from published.yaml.

RocketKV's scores and its order of methods: the tasks here are our own there, and the wording and, for some, the
haystack differ from the paper's. Both policies of a claimed pair answered the same questions, so their difference is
taken question by question, and its standard error is that of the differences. Only groups of questions that the full
cache answers take part. SnapKV's scores on the data sets of LongBench: these can be asked as they were there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from kvc_trt.accuracy.cell import Cell, Mean, paired_difference
from kvc_trt.accuracy.grid import QuestionGroup


@dataclass(frozen=True)
class Published:
    """One table's column: a model's scores on one benchmark at one length."""

    model: str
    """The name of the model's preset."""
    benchmark: str
    length: int | None
    """Context length in tokens; None where the table names none."""
    by_policy: dict[str, dict[int | None, float]]
    """Percentages by policy and token budget; a score that holds at any budget has the budget None."""


@dataclass(frozen=True)
class PublishedTables:
    """All columns that one source publishes."""

    source: str
    budgets: tuple[int, ...]
    columns: tuple[Published, ...]
    claims: tuple[tuple[str, str], ...]
    """Pairs of policies of which the first answers at least as much as the second, at low budgets."""

    def of(self, model: str) -> list[Published]:
        """The columns of a preset; empty for a model that the paper does not measure."""
        return [one for one in self.columns if one.model == model]


@dataclass(frozen=True)
class PublishedSets:
    """One source's scores on data sets that a user can ask too, in percent."""

    source: str
    names: tuple[str, ...]
    """The data sets, as a converted file names them."""
    by_model: dict[str, dict[str, tuple[float, ...]]]
    """One score per data set, by the name of the model, then by policy."""

    def of(self, model: str) -> dict[str, tuple[float, ...]]:
        """The scores of a model, by policy; empty for one that is not measured."""
        return self.by_model.get(model.lower(), {})


@cache
def _stored() -> Mapping[str, Any]:
    from kvc_trt.files.strict_yaml import parsed_yaml

    text = files("kvc_trt.accuracy.pages").joinpath("published.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = parsed_yaml(text, "published.yaml")
    return found


@cache
def published_sets() -> PublishedSets:
    """SnapKV's table of LongBench, read from published.yaml."""
    stored = _stored()["sets"]
    by_model = {
        model: {policy: tuple(map(float, scores)) for policy, scores in rows.items()}
        for model, rows in stored["models"].items()
    }
    return PublishedSets(stored["source"], tuple(stored["names"]), by_model)


@cache
def published_tables() -> PublishedTables:
    """The paper's tables, read from published.yaml."""
    stored = _stored()
    budgets = tuple(stored["budgets"])
    columns = (
        Published(
            one["model"],
            one["benchmark"],
            one["length"],
            {policy: _by_budget(scores, budgets) for policy, scores in one["scores"].items()},
        )
        for one in stored["tables"]
    )
    claims = tuple((first, second) for first, second in stored["claims"])
    return PublishedTables(stored["source"], budgets, tuple(columns), claims)


def _by_budget(scores: Any, budgets: tuple[int, ...]) -> dict[int | None, float]:
    if not isinstance(scores, list):
        return {None: float(scores)}
    return {b: float(score) for b, score in zip(budgets, scores, strict=True) if score is not None}


Verdict = Literal["holds", "equal within the error", "does not hold"]
"""The claim is first >= second: equality within the error does not contradict it."""

NOTICEABLE = 2.0
"""The number of standard errors beyond which a difference counts."""


@dataclass(frozen=True)
class Comparison:
    """First policy minus second, over every group that both answered."""

    first: str
    second: str
    mode: str
    token_budget: int
    difference: Mean
    groups: tuple[QuestionGroup, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the claim that the first answers at least as much as the second, within the error."""
        noise = NOTICEABLE * self.difference.standard_error
        if abs(self.difference.value) <= noise:
            return "equal within the error"
        return "holds" if self.difference.value > 0 else "does not hold"


def method_of(policy: str) -> str:
    """Return the policy of a variant without a file of scores that it reads: another file makes no other method."""
    name, *settings = policy.split(":")
    return ":".join([name, *(one for one in settings if not one.startswith("head_pattern="))])


def compare(cells: Sequence[Cell], first: str, second: str, mode: str, token_budget: int) -> Comparison | None:
    """The two policies at one budget; None where no group counts in which both answered."""
    mine, other = (
        {
            cell.group: cell
            for cell in cells
            if (method_of(cell.policy), cell.token_budget, cell.mode) == (policy, token_budget, mode)
            and cell.scores
            and cell.evidence
        }
        for policy in (first, second)
    )
    common = tuple(group for group in mine if group in other)
    if not common:
        return None
    scores = [[score for group in common for score in side[group].scores] for side in (mine, other)]
    return Comparison(first, second, mode, token_budget, paired_difference(*scores), common)


def paper_order(cells: Sequence[Cell]) -> list[Comparison]:
    """Every claim at every budget and in every mode that the cells speak of."""
    modes = dict.fromkeys(cell.mode for cell in cells)
    budgets = sorted({cell.token_budget for cell in cells if cell.token_budget is not None})
    found = [
        compare(cells, first, second, mode, budget)
        for mode in modes
        for first, second in published_tables().claims
        for budget in budgets
    ]
    return [one for one in found if one is not None]


def summary(comparisons: Sequence[Comparison]) -> list[str]:
    """One sentence per mode: how many comparisons of the claims came out how."""
    lines = []
    for mode in dict.fromkeys(one.mode for one in comparisons):
        found = [one.verdict for one in comparisons if one.mode == mode]
        counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in get_args(Verdict))
        lines.append(f"{mode}: of {len(found)} comparisons (claim and budget) {counts}")
    return lines
