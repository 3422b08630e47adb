"""The two results of the real model's accuracy, read together: our policies' cells and kvpress's presses' cells.

A question has the same place in the scores of every cell of its group, whoever answered it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import store
from benchmarks.accuracy.kvpress.presses import ADAKV
from benchmarks.accuracy.paired import difference
from benchmarks.accuracy.smollm2.stages import POOLS
from kvc_trt.accuracy.cell import Mean, interval, mean, on_answered
from kvc_trt.accuracy.grid import CHAT, MODES
from kvc_trt.errors import InputError
from kvc_trt.policies import BASELINE

OURS, KVPRESS = "kvc-trt", "kvpress"
WORDS = {"niah-single-1": "one needle", "niah-multikey-1-prose": "a needle among others", "log-summary": "a summary"}
"""Tasks that policies are asked, in words."""
SHORTEST = 2048
"""Tokens of most groups."""


class Group(NamedTuple):
    """One group of questions."""

    task: str
    mode: str
    length: int
    framing: str

    @property
    def framed(self) -> str:
        """The framing in words."""
        return "through the chat template" if self.framing == "chat" else "plain"

    @property
    def short(self) -> str:
        """The group in few words, without the properties that most groups share (those of SHORTEST)."""
        differs = [
            (self.length != SHORTEST, f"{self.length:,} tokens"),
            (self.mode != MODES[0], "question after compaction"),
            (self.framing != CHAT, "plain prompt"),
        ]
        return ", ".join([WORDS.get(self.task, self.task), *(said for there, said in differs if there)])

    def __str__(self) -> str:
        return f"{self.task}, {self.length:,} tokens, {self.mode}, {self.framed}"


@dataclass(frozen=True)
class Answered:
    """The answers of one method to a group's questions at one point."""

    side: str
    """OURS or KVPRESS."""
    group: Group
    method: str
    """A policy, or a press."""
    point: str
    """budget 256, bytes of rocketkv 256, ratio 0.5, or full."""
    stored: int
    """Bytes of cache of one sequence, the answer included."""
    scores: tuple[float, ...]
    likelihood: bool
    """True if the scores are negative log-likelihoods."""

    @property
    def mean(self) -> Mean:
        """Over all questions."""
        return mean(self.scores)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of an accuracy."""
        return interval(self.mean.value, len(self.scores))


@dataclass(frozen=True)
class Comparison:
    """Everything that is known."""

    ours: dict[str, Any]
    """The result files as they are."""
    theirs: dict[str, Any]
    cells: tuple[Answered, ...]
    absent: tuple[tuple[Group, str, int | None, str], ...]
    """Groups, policies and budgets without an engine, and the reason."""

    @cached_property
    def groups(self) -> list[Group]:
        """Return the groups that were asked, in the order of the answers."""
        return list(dict.fromkeys(cell.group for cell in self.cells if cell.side == OURS))

    @cached_property
    def _by_place(self) -> dict[tuple[str, Group, str, str], Answered]:
        return {(cell.side, cell.group, cell.method, cell.point): cell for cell in self.cells}

    def cell(self, side: str, group: Group, method: str, point: str) -> Answered | None:
        """One cell, if it was asked."""
        return self._by_place.get((side, group, method, point))

    def full(self, group: Group, side: str = OURS) -> Answered | None:
        """Return the whole cache."""
        return self.cell(side, group, BASELINE, BASELINE)

    def of(self, side: str, group: Group) -> list[Answered]:
        """Return a side's cells of a group, without the whole cache and the variants that only explain others."""
        aside = (BASELINE, *POOLS)
        return [one for one in self.cells if (one.side, one.group) == (side, group) and one.method not in aside]

    def on_answered(self, cell: Answered) -> Mean | None:
        """Accuracy on the questions that the same side's whole cache answers."""
        full = self.full(cell.group, cell.side)
        return None if full is None or cell.likelihood else on_answered(cell.scores, full.scores)

    def lost(self, cell: Answered) -> Mean | None:
        """Return the cell minus the same side's whole cache, question by question."""
        full = self.full(cell.group, cell.side)
        return None if full is None else difference(cell.scores, full.scores)


def methods(cells: Sequence[Answered]) -> list[str]:
    """Return the methods of some cells, in their order."""
    return list(dict.fromkeys(cell.method for cell in cells))


def read(ours: Path, theirs: Path | None) -> Comparison:
    """Both results; the second may not be there yet. InputError where they are answers to other questions."""
    mine = store.read(ours)
    other = store.read(theirs) if theirs is not None and theirs.is_file() else {}
    cells = [_ours(one) for one in mine["cells"] if one.get("scores")]
    if other:
        _check_same_questions(mine, other)
        cells += _theirs(other)
    absent = [(_group(c), c["policy"], c.get("token_budget"), c["reason"]) for c in mine["cells"] if "reason" in c]
    return Comparison(mine, other, tuple(cells), tuple(absent))


def _group(cell: dict[str, Any]) -> Group:
    return Group(cell["task"], cell["mode"], cell["length"], cell["framing"])


def _ours(cell: dict[str, Any]) -> Answered:
    budget = cell.get("token_budget")
    point = BASELINE if budget is None else f"budget {budget}"
    return Answered(
        OURS, _group(cell), cell["policy"], point, cell["row_bytes"], tuple(cell["scores"]),
        cell["scored_by"] == "likelihood",
    )  # fmt: skip


def _theirs(result: dict[str, Any]) -> list[Answered]:
    """kvpress's cells. AdaKV masks tokens and frees none: it stores as much as the whole cache."""
    whole = {_group(one): one["kept"] for one in result["cells"] if one["press"] == BASELINE}
    found = []
    for cell in result["cells"]:
        kept = whole[_group(cell)] if cell["press"] == ADAKV else cell["kept"]
        stored = round(sum(kept) / len(kept)) + cell["output_tokens"]
        found.append(
            Answered(
                KVPRESS, _group(cell), cell["press"], cell["label"], stored * result["bytes_per_token"],
                tuple(cell["scores"]), cell["task"] == "log-summary",
            )
        )  # fmt: skip
    return found


SAME_QUESTIONS = {
    "01912d3ce4430078d96b2565e6f80d27b84e406560f54349a9cd8083c29ceacc": (
        "2b6233b7b68ec058241dad6b41d236883a7b3cb1c27c2631aee5951ba24ed832"
    ),
    "63e05874c41ce538f9e2067b7ad50d88a6d0d69ad00dde55d7f2f2b86d8daa9d": (
        "2417fe1627c3e979673982c4fe9a07f67e434984e35ea6270c5e2a80b0aef123"
    ),
    "efb9be04631542b063ea4d6d9fce4b054a601b90ca8d11b748709e02687a6484": (
        "b3bf53bd0a3696ed0467e3e6657953d6562e7dc1e15aac258a476bd8890dd444"
    ),
    "ffa62c04a52c3f356998693c76e4308763cacf32f746c47931641a9631ce9164": (
        "555e526a7405e4d2a1bcce729bdfc0691d14c2d53803d4e73c1655a71c99b7ca"
    ),
}
"""Digests of data sets -> those of the same samples with the tokenizer's file as it was written before: that spelled
out a field that is null, and a data set's digest has that of the file in it."""


def questions(digest: str) -> str:
    """Return the digest under which a data set's questions were first asked."""
    return SAME_QUESTIONS.get(digest, digest)


def _check_same_questions(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    models = [one["settings"]["checkpoint"] for one in (ours, theirs)]
    if models[0] != models[1]:
        raise InputError(
            f"kvpress's result: expected answers of checkpoint {models[0]}, found {models[1]}; "
            "run make bench-accuracy-smollm2"
        )
    asked = {_group(one): questions(one["dataset"]) for one in ours["cells"] if one.get("scores")}
    for cell in theirs["cells"]:
        expected = asked.get(_group(cell), cell["dataset"])
        if questions(cell["dataset"]) != questions(expected):
            raise InputError(
                f"kvpress's result, {_group(cell)}: expected answers to data set {expected}, found {cell['dataset']}; "
                "run make bench-accuracy-smollm2"
            )
