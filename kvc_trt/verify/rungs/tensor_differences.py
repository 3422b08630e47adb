"""Find the tensors in which two runs of one graph differ, by Polygraphy's comparison, near-ties aside.

Where a policy selects, two executors may rightly choose different tokens: scores that are equal to rounding swap. Each
side's choice is then judged against the reference on the inputs it got; if both hold, what follows from the choice is
not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.harness import Watched
from kvc_trt.graph.state import cache_sites
from kvc_trt.methods.base.isolated_runs import ReadByStep, page_bounds
from kvc_trt.runtime.session.batch import Batch
from kvc_trt.verify.checks import Rung, at_most
from kvc_trt.verify.engine_run import judge_compaction
from kvc_trt.verify.rankings.index_lists import IndexComparison
from kvc_trt.verify.rankings.steps import compare_step
from kvc_trt.verify.report import NearTies

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.engine import EngineDirectory

Array = NDArray[Any]
Values = Mapping[str, Array]


def tensor_names(model: ModelProto) -> list[str]:
    """Every tensor that a node of the graph computes, in the graph's order, without constants."""
    return [name for node in model.graph.node if node.op_type != "Constant" for name in node.output if name]


@dataclass(frozen=True)
class Judge:
    """The bars by which two runs of a graph agree."""

    graph: str
    """prefill or decode."""
    model: ModelProto
    engine: EngineDirectory
    choosers: Sequence[Watched]
    """Nodes of the graph that choose tokens."""
    batch: Batch
    bar: float
    """Largest error of a float tensor, over its largest value; integers are equal."""
    near_ties: NearTies
    """Counts the lists that were excused."""

    def tolerances(self, base: Sequence[Values]) -> dict[str, float]:
        """Per tensor, in the graph's order, the largest absolute difference from these runs."""
        names = tensor_names(self.model)
        return {name: self.bar * _scale(name, base) if _is_float(base[0][name]) else 0.0 for name in names}

    def rung(self, feeds: Sequence[Values], results: Any, side: int, *, truncates: bool = False) -> Rung:
        """Compare the first of Polygraphy's `results` with number `side`.

        `truncates`: tensor cores have summed the products of scores there."""
        from polygraphy.comparator import Comparator, SimpleCompareFunc

        base, other = results[0][1], results[side][1]
        tolerances = self.tolerances(base)
        common = [name for name in tolerances if name in other[0]]
        compared = Comparator.compare_accuracy(
            results,
            comparisons=[(0, side)],
            compare_func=SimpleCompareFunc(
                rtol=0.0,
                atol={**tolerances, "": 0.0},
                check_error_stat="max",
                infinities_compare_equal=True,
                find_output_func=lambda name, index, found: [name] if name in found else None,
            ),
        )[0]
        [verdicts] = compared.values()
        judged, worst, wrong, after_ties, differently_rounded = 0, 0.0, [], 0, 0
        worst_name = ""
        for run, verdict in enumerate(verdicts):
            excused = self._excused(feeds[run], base[run], other[run], truncates)
            rounded = self._rounded(feeds[run], base[run], other[run])
            for name in common:
                if name in excused or name in rounded:
                    after_ties += int(name in excused)
                    differently_rounded += int(name not in excused)
                    continue
                judged += 1
                error = _error(verdict[name]) / _scale(name, base)
                if not error <= worst:
                    worst, worst_name = error, name
                if not verdict[name]:
                    wrong.append((run, name, error))
        rung = Rung(f"{self.graph}: {results[0][0]} | {results[side][0]}")
        sample = f"{len(common)} tensors" + (f" x {len(verdicts)} steps" if self.graph == "decode" else "")
        first = "" if not wrong else _first(self.graph, *wrong[0])
        notes = (
            (after_ties, "tensors follow from choices that rounding decided and are not judged"),
            (differently_rounded, "fp8 bounds differ, each exactly those of its side's keys"),
        )
        note = "; ".join(f"{count} {text}" for count, text in notes if count)
        rung.checks.append(at_most("tensors beyond the bar", sample, len(wrong), 0, first, note))
        rung.checks.append(at_most("largest error", f"{judged} comparisons", worst, self.bar, worst_name))
        return rung

    def _excused(self, feed: Values, base: Values, other: Values, truncates: bool) -> set[str]:
        """Tensors that follow from a choice on which the sides differ though each chose rightly among what it got."""
        excused: set[str] = set()
        for op in self.choosers:
            listed = op.outputs[-1]
            if listed not in other or np.array_equal(base[listed], other[listed]):
                continue
            sides = [self._judged(op, feed, base, False), self._judged(op, feed, other, truncates)]
            if any(found is None or found.wrong for found in sides):
                continue
            for found in sides:
                assert found is not None
                self.near_ties.lists_compared += found.compared
                self.near_ties.lists_admitted += found.near_ties
                self.near_ties.tokens_swapped += found.swapped_tokens
            excused |= _following(self.model, listed)
        return excused

    def _rounded(self, feed: Values, base: Values, other: Values) -> set[str]:
        """Return the fp8 bounds in which the sides differ though each has exactly those of its own keys.

        Keys that differ within the bar may be rounded to numbers a step apart."""
        differing = [
            name
            for name, bounds in base.items()
            if bounds.dtype == np.int8 and name in other and not np.array_equal(bounds, other[name])
        ]
        return {name for name in differing if all(self._are_of_own_keys(name, feed, side) for side in (base, other))}

    def _are_of_own_keys(self, name: str, feed: Values, side: Values) -> bool:
        kind, _, where = name.partition(".")
        sites = {site.name: site for site in cache_sites(self.engine.model, self.engine.parameters)}
        keys = f"{kind.replace('bounds', 'k_cache')}.{where}"
        if where not in sites or keys not in side:
            return False
        site = sites[where]
        step = kind.endswith("_out")
        lengths = feed["cache_lengths"][site.cache] + 1 if step else side["cache_lengths"][site.cache]
        return np.array_equal(side[name], page_bounds(side[keys], lengths, site.parameters.page_size, fp8=True))

    def _judged(self, op: Watched, feed: Values, side: Values, truncates: bool) -> IndexComparison | None:
        """One side's choice against the reference on the inputs it got; None where they are not known."""
        site = cache_sites(self.engine.model, self.engine.parameters)[op.cache]
        if not op.inputs or any(name not in side for name in (*op.inputs, *op.outputs)):
            return None
        if self.graph == "prefill":
            inputs = [side[name] for name in op.inputs]
            return judge_compaction(site, inputs, side[op.outputs[-1]], self.batch, truncates=truncates)
        keys, values = (side[f"{kind}_cache_out.{site.name}"] for kind in "kv")
        lengths = feed["cache_lengths"][op.cache] + 1
        output, selected = (side[name] for name in op.outputs)
        read = ReadByStep(keys, values, lengths, output, selected)
        return compare_step(side[op.inputs[0]], read, site.parameters, exact=True, truncates=truncates)[0]


def _scale(name: str, runs: Sequence[Values]) -> float:
    """The unit of an error: the largest value of the smallest run, at least 1; for integers 1."""
    if not _is_float(runs[0][name]):
        return 1.0
    limit = np.finfo(runs[0][name].dtype).max  # an empty page's bounds
    magnitudes = (np.abs(run[name]) for run in runs)
    return min(max(1.0, float(values.max(initial=0.0, where=values < limit))) for values in magnitudes)


def _is_float(value: Array) -> bool:
    return bool(np.issubdtype(value.dtype, np.floating))


def _error(verdict: Any) -> float:
    """The largest absolute difference; infinite for another shape."""
    return float("inf") if isinstance(verdict, bool) else float(verdict.max_absdiff)


def _first(graph: str, run: int, name: str, error: float) -> str:
    where = f" in step {run + 1}" if graph == "decode" else ""
    return f"the first is {name}{where}, off by {error:.1e}"


def _following(model: ModelProto, name: str) -> set[str]:
    """Everything that the node which computes `name` gives, and all that is computed from it."""
    found: set[str] = set()
    for node in model.graph.node:
        if name in node.output or found.intersection(node.input):
            found.update(node.output)
    return found
