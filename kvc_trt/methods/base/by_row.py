"""Layer budgets for each prompt under evictions that go on at every step: rows of one cache with budgets of their own.

A method has two more kinds for it, subclasses of its own: an eviction that keeps of a prompt as much as a layer may get
and trims it to the row's budget, and a selection whose operators read `cache_capacities`, the slots that each row uses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from typing_extensions import override

from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection, decode_selection
from kvc_trt.methods.base.isolated_runs import (
    Array,
    Found,
    PromptCase,
    PromptRun,
    RunnableAlone,
    StepCase,
    StepRun,
    TurnCase,
)
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.operators.attention.stored_rows import CAPACITIES, RECENTS
from kvc_trt.operators.compaction.compact import STORED_KEYS, STORED_VALUES
from kvc_trt.operators.compaction.trim_beside_recent import BUDGETS, TRIM_BESIDE_RECENT
from kvc_trt.operators.schema import Operator, Tensor
from kvc_trt.operators.tensors import K_CACHE, V_CACHE

if TYPE_CHECKING:
    from kvc_trt.methods.base.graph_context import CacheLayer, StepLayer, TurnLayer
    from kvc_trt.operators.emitter import Value

Case = TypeVar("Case", StepCase, TurnCase)
Run: TypeAlias = "Callable[[RunnableAlone, Case, Constants], Found]"


class SelectionByRow(DecodeSelection):
    """A selection that evicts at every step, in caches whose rows have capacities."""

    @override
    def decode(self, step: StepLayer) -> Value:
        return step.attend(self.operators[0], {RECENTS.name: self.recents(step.emit, step.rule, budgets_of(step))})

    @property
    @abstractmethod
    def alike(self) -> DecodeSelection:
        """The selection of caches whose rows are alike."""

    @override
    def runs(self) -> Mapping[str, StepRun]:
        """Return the runs of the operators whose rows are alike, with each row as if it were alone."""
        runs = zip(self.operators, self.alike.runs().values(), strict=True)
        return {own.name: rows_alone(own, run) for own, run in runs}


class TrimmedByRow(PromptEviction):
    """An eviction whose prompts are trimmed to the budgets of rows, once these are known.

    Until then `store` leaves the outputs of a compaction with scores and positions under the names of `kept_name`.
    """

    trims = True

    @override
    def runs(self) -> Mapping[str, PromptRun]:
        return {**super().runs(), TRIM_BESIDE_RECENT.name: run_trim}

    @override
    def trim(self, cache: CacheLayer, budgets: Value, lengths: Value, *, bounds: bool) -> None:
        emit, selection = cache.emit, decode_selection(cache.rule.decode_selection)
        stored = zip(cache.parts(STORED_KEYS, STORED_VALUES), cache.parts(K_CACHE, V_CACHE), strict=True)
        inputs = {name: kept_name(part, cache.name) for name, part in stored}
        inputs |= {
            "kept_scores": kept_name("scores", cache.name),
            "kept_positions": kept_name("slot_positions", cache.name),
            "prompt_lengths": kept_name("cache_lengths", cache.name),
            BUDGETS.name: budgets,
            RECENTS.name: selection.recents(emit, cache.rule, budgets),
        }
        carried = {tensor.name for tensor in selection.state}
        outputs = {
            name: f"unused_{own}" if name in ("scores", "slot_positions") and name not in carried else own
            for name, own in cache.stored(TRIM_BESIDE_RECENT, bounds=False).items()
        }
        cache.call(TRIM_BESIDE_RECENT, inputs, outputs, prompt_budget=cache.rule.capacity - selection.spare_slots)
        slots = emit.Unsqueeze(emit.Add(budgets, selection.spare_slots), [1, 2])
        emit.cast(slots, np.int32, outputs=[f"{CAPACITIES.name}.{cache.name}"])


def budgets_of(layer: StepLayer | TurnLayer) -> Value:
    """Graph: return the budgets of a cache's rows, INT64 [B]."""
    emit, spare = layer.emit, decode_selection(layer.rule.decode_selection).spare_slots
    slots = emit.Reshape(emit.cast(layer.state(CAPACITIES.name), np.int64), [-1])
    return str(emit.Sub(slots, spare) if spare else slots)


def kept_name(tensor: str, cache: str) -> str:
    """Return the name of a tensor that a cache keeps of a prompt until its rows' budgets are known."""
    return f"{tensor}_kept.{cache}"


def keep_capacities(turn: TurnLayer) -> None:
    """Graph: pass the rows' capacities on, which a turn does not change."""
    turn.emit.Identity(turn.state(CAPACITIES.name), outputs=[turn.updated(CAPACITIES.name)])


def run_trim(operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
    """Run KvcTrimBesideRecent, each row to another budget, on scores that repeat, every third position of a text."""
    import torch

    from kvc_trt.reference.methods.heavy_hitters import stay

    selection = decode_selection(rule.decode_selection)
    most = rule.capacity - selection.spare_slots
    entries = np.minimum(case.prompt_lengths, most)
    budgets = np.linspace(rule.sinks + 1, most, len(entries)).astype(np.int64)
    recents = np.array([selection.recent_of(rule, budget) for budget in budgets.tolist()], np.int64)
    shape = case.k.shape[:3]
    scores = (np.random.default_rng(11).integers(0, 9, shape) / 8).astype(np.float32)
    there = np.arange(shape[2]) < entries[:, None, None]
    positions = np.broadcast_to(np.where(there, np.arange(shape[2]) * 3, -1), shape).astype(np.int32)
    keys, values = case.kept(np.where(there, np.arange(shape[2]), -1) + np.zeros(shape, np.int64))
    results = operator.run(
        k=keys, v=values, kept_scores=scores, kept_positions=positions, budgets=budgets, recents=recents,
        prompt_lengths=entries,
    )  # fmt: skip
    found = dict(zip((one.name for one in TRIM_BESIDE_RECENT.outputs), results, strict=True))
    slots = found["indices"].shape[2]
    chosen = np.full((*shape[:2], slots), -1, np.int64)
    for row, (m, budget, recent) in enumerate(zip(entries, budgets.tolist(), recents.tolist(), strict=True)):
        index = stay(torch.from_numpy(scores[row, :, :m]), heavy=budget - recent, recent=recent).numpy()
        chosen[row, :, : index.shape[1]] = index
    picked = np.maximum(chosen, 0)
    text = np.where(chosen < 0, -1, np.take_along_axis(positions, picked, axis=2)).astype(np.int32)
    paid = np.where(chosen < 0, 0, np.take_along_axis(scores, picked, axis=2)).astype(np.float32)
    expected = {"indices": text, "slot_positions": text, "scores": paid}
    caches = zip(("k_cache", "v_cache"), case.kept(chosen), strict=True)
    return Found(
        moved=(
            *((found[name], table) for name, table in (*expected.items(), *caches)),
            (found["cache_lengths"], np.minimum(entries, budgets)),
        )
    )


def rows_alone(own: Operator, alike: Run[Case]) -> Run[Case]:
    """Return the run of `own`, whose rows have capacities: each row by the run of the operator whose rows are alike."""

    def run(operator: RunnableAlone, case: Case, rule: Constants) -> Found:
        found, selection = Found(), decode_selection(rule.decode_selection)
        for row, entries in enumerate(case.cache_lengths.tolist()):
            budget = entries + 1 - (selection.spare_slots if row % 2 else 0)
            budget = min(max(budget, rule.sinks + 1), rule.capacity - selection.spare_slots)
            alone = selection.at_budget(rule, budget)
            of_row = alike(_OfOneRow(operator, own, rule, alone), _row_of(case, row, alone.capacity), alone)
            found += replace(of_row, lists=[one._replace(row=row) for one in of_row.lists])
        return found

    return run


@dataclass(frozen=True)
class _OfOneRow:
    """Runs an operator with a capacity for each row on one row, as if it were the operator without capacities.

    Beside it runs a copy of the row that uses all slots, so that results are shown not to depend on other rows."""

    operator: RunnableAlone
    schema: Operator
    rule: Constants
    """The rule of the whole cache."""
    alone: Constants
    """The rule of the row."""

    def run(self, **inputs: Array) -> list[Array]:
        given = {
            tensor.name: self._of_both(tensor, inputs[tensor.name])
            for tensor in self.schema.inputs
            if tensor.name in inputs
        }
        results = self.operator.run(**given, **self._numbers())
        return [
            self._of_row(tensor, result)
            for tensor, result in zip(self.schema.outputs, results, strict=True)
            if tensor.alias != CAPACITIES.name
        ]

    def _numbers(self) -> dict[str, Array]:
        spare = self.rule.capacity - decode_selection(self.rule.decode_selection).spare_slots
        whole = decode_selection(self.rule.decode_selection).at_budget(self.rule, spare)
        both = (self.alone, whole)
        numbers: dict[str, Array] = {
            CAPACITIES.name: np.array([[[rule.capacity]] for rule in both], np.int32),
            RECENTS.name: np.array([rule.recent for rule in both], np.int64),
            BUDGETS.name: np.array([rule.token_budget for rule in both], np.int64),
        }
        return {tensor.name: numbers[tensor.name] for tensor in self.schema.inputs if tensor.name in numbers}

    def _of_both(self, tensor: Tensor, table: Array) -> Array:
        """Give a row's tensor the slots of the whole cache, twice."""
        missing = self.rule.capacity - self.alone.capacity
        widths = [(0, missing if symbol in ("C", "R", "T") else 0) for symbol in tensor.shape]
        fill = 0 if tensor.fill == "lowest" else tensor.fill
        padded = np.pad(table, widths, constant_values=np.array(fill, table.dtype))
        return np.concatenate([padded, padded]) if tensor.shape[0] == "B" else padded

    def _of_row(self, tensor: Tensor, result: Array) -> Array:
        one: Array = result[:1, :, : self.alone.capacity] if "C" in tensor.shape else result[:1]
        return one


def _row_of(case: Case, row: int, slots: int) -> Case:
    """Return one row of a case, in caches of `slots` slots."""
    one = slice(row, row + 1)
    tables: dict[str, Any] = {name: table[one] for name, table in vars(case).items() if isinstance(table, np.ndarray)}
    tables |= {name: tables[name][:, :, :slots] for name in ("k_cache", "v_cache")}
    tables["cache_lengths"] = np.minimum(tables["cache_lengths"], slots)
    return replace(case, **tables)
