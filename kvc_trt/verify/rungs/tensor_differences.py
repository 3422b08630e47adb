"""Find the tensors in which two runs of one graph differ, by Polygraphy's comparison, except for near-ties.

If a policy selects tokens, two executors may rightly choose different ones, because rounding can swap nearly equal
scores. Each side's choice is then judged against the reference on its own inputs; if both are right, tensors that
depend on the choice are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.harness import StoredBlock, Watched
from kvc_trt.graph.state import cache_sites
from kvc_trt.methods.base.isolated_runs import ReadByStep, page_bounds
from kvc_trt.operators.schema import Tensor, parts_of
from kvc_trt.operators.tensors import updated
from kvc_trt.runtime.session.batch import Batch
from kvc_trt.verify.checks import Rung, at_most
from kvc_trt.verify.codes.parts import CACHES, parts_by_name, read_table, stored_parts
from kvc_trt.verify.codes.stored_tokens import StoredTokens
from kvc_trt.verify.engine_run import judge_compaction
from kvc_trt.verify.rankings.index_lists import IndexComparison
from kvc_trt.verify.rankings.steps import compare_step
from kvc_trt.verify.report import NearTies
from kvc_trt.verify.softmaxes import softmaxes

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.engine import EngineDirectory
    from kvc_trt.graph.state import CacheSite

Array = NDArray[Any]
Values = Mapping[str, Array]


def tensor_names(model: ModelProto) -> list[str]:
    """Return the names of all tensors that the graph's nodes compute, in their order, without constants."""
    return [name for node in model.graph.node if node.op_type != "Constant" for name in node.output if name]


@dataclass(frozen=True)
class Judge:
    """The graph, and the bars by which two of its runs agree."""

    graph: str
    """prefill or decode."""
    model: ModelProto
    engine: EngineDirectory
    choosers: Sequence[Watched]
    """The nodes of the graph that choose tokens."""
    batch: Batch
    bar: float
    """The largest error of a float tensor, divided by its largest value; integers must be equal."""
    near_ties: NearTies
    """The counts of lists that were admitted as near-ties."""
    blocks: Sequence[StoredBlock] = ()
    """The tokens that the graph stores in caches that have a format."""

    def tolerances(self, base: Sequence[Values]) -> dict[str, float]:
        """Per tensor, in the graph's order, the largest absolute difference from these runs."""
        names, exact = tensor_names(self.model), {name for site in self._sites for name in self._parts(site)}
        rounded = {name for name in names if _is_float(base[0][name]) and not (self.blocks and name in exact)}
        return {name: self.bar * _scale(name, base) if name in rounded else 0.0 for name in names}

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
        judged, worst, wrong, after_ties, differently_rounded, after_codes = 0, 0.0, [], 0, 0, 0
        worst_name = ""
        for run, verdict in enumerate(verdicts):
            excused = self._excused(feeds[run], base[run], other[run], truncates)
            rounded = self._rounded(feeds[run], base[run], other[run])
            flipped = self._flipped(feeds[run], base[run], other[run])
            for name in common:
                if name in excused or name in rounded or name in flipped:
                    after_ties += int(name in excused)
                    after_codes += int(name in flipped - excused)
                    differently_rounded += int(name not in excused | flipped)
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
            (after_codes, "tensors follow from codes that differ, each exactly those of its side's keys and values"),
        )
        note = "; ".join(f"{count} {text}" for count, text in notes if count)
        rung.checks.append(at_most("tensors beyond the bar", sample, len(wrong), 0, first, note))
        rung.checks.append(at_most("largest error", f"{judged} comparisons", worst, self.bar, worst_name))
        return rung

    def _excused(self, feed: Values, base: Values, other: Values, truncates: bool) -> set[str]:
        """Return the tensors that follow from a choice in which the sides differ though each was right for its own
        inputs."""
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
            if name.startswith("bounds")
            and bounds.dtype == np.int8
            and name in other
            and not np.array_equal(bounds, other[name])
        ]
        return {name for name in differing if all(self._are_of_own_keys(name, feed, side) for side in (base, other))}

    def _are_of_own_keys(self, name: str, feed: Values, side: Values) -> bool:
        kind, _, where = name.partition(".")
        sites = {site.name: site for site in cache_sites(self.engine.model, self.engine.parameters)}
        if where not in sites:
            return False
        site, step = sites[where], kind.endswith("_out")
        keys = self._keys(site, side)
        lengths = feed["cache_lengths"][site.cache] + 1 if step else side["cache_lengths"][site.cache]
        return np.array_equal(side[name], page_bounds(keys, lengths, site.parameters.page_size, fp8=True))

    def _flipped(self, feed: Values, base: Values, other: Values) -> set[str]:
        """Tensors that follow from codes in which the sides differ, though each has those of its own keys and values.

        Keys that differ within the bar may be rounded to another code, or by another scale."""
        found: set[str] = set()
        for block in self.blocks:
            site = self._sites[block.cache]
            names = [name for name in self._parts(site) if name in other]
            differing = [name for name in names if not np.array_equal(base[name], other[name])]
            if differing and all(self._has_own_codes(block, feed, side) for side in (base, other)):
                for name in differing:
                    found |= _following(self.model, name)
        return found

    def _has_own_codes(self, block: StoredBlock, feed: Values, side: Values) -> bool:
        """Tell whether a side's cache holds the codes of its own keys and values."""
        if any(name not in side for name in (block.keys, block.values)):
            return False
        site = self._sites[block.cache]
        if self.graph == "decode":
            form = site.parameters.cache_format
            new = zip(CACHES, self._tensors, (form.keys, form.values), (block.keys, block.values), strict=True)
            return all(
                vector is not None
                and _stores(
                    stored_parts(side[exact], vector),
                    parts_by_name(before, vector, feed, f".{site.name}"),
                    parts_by_name(after, vector, side, f".{site.name}"),
                )
                for before, after, vector, exact in new
            )
        stored, name = StoredTokens(self._sites, {self.graph: [[block]]}), f"indices.{site.name}"
        listed = side[name] if name in side else None  # noqa: SIM401 (Polygraphy's results have no `get`)
        kept = {} if listed is None else {block.cache: listed}
        stored.after_prompt(_Shown(side), side, kept, self.batch.prompt_lengths)
        return not stored.found.wrong

    @property
    def _sites(self) -> tuple[CacheSite, ...]:
        return cache_sites(self.engine.model, self.engine.parameters)

    def _parts(self, site: CacheSite) -> list[str]:
        """Return the names of the tensors that hold keys and values of a cache after the graph."""
        form, tensors = site.parameters.cache_format, self._tensors
        return [f"{part.name}.{site.name}" for tensor in tensors for part in parts_of(tensor, form)]

    @property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        return CACHES if self.graph == "prefill" else (updated(CACHES[0]), updated(CACHES[1]))

    def _keys(self, site: CacheSite, side: Values) -> Array:
        """Return the keys of a cache after the graph, as they are read."""
        return read_table(side, self._tensors[0], site.parameters.cache_format.keys, f".{site.name}")

    def _values(self, site: CacheSite, side: Values) -> Array:
        return read_table(side, self._tensors[1], site.parameters.cache_format.values, f".{site.name}")

    def _judged(self, op: Watched, feed: Values, side: Values, truncates: bool) -> IndexComparison | None:
        """One side's choice against the reference on the inputs it got; None where they are not known."""
        site = cache_sites(self.engine.model, self.engine.parameters)[op.cache]
        softmax = softmaxes(self.engine)[site.layer]
        if not op.inputs or any(name not in side for name in (*op.inputs, *op.outputs)):
            return None
        if self.graph == "prefill":
            inputs = [side[name] for name in op.inputs]
            kept = side[op.outputs[-1]]
            return judge_compaction(site, inputs, kept, self.batch, softmax, truncates=truncates)
        keys, values = self._keys(site, side), self._values(site, side)
        lengths = feed["cache_lengths"][op.cache] + 1
        output, selected = (side[name] for name in op.outputs)
        read = ReadByStep(side[op.inputs[0]], keys, values, lengths, output, selected, softmax)
        return compare_step(read, site.parameters, exact=True, truncates=truncates)[0]


def _stores(new: Sequence[Array], before: Sequence[Array], after: Sequence[Array]) -> bool:
    """Tell whether a step stores the parts `new` [B,G,.] in one slot of each head, and leaves the others [B,G,C,.]."""
    changed = np.any([(old != left).any(axis=-1) for old, left in zip(before, after, strict=True)], axis=0)
    expected = (np.where(changed[..., None], one[:, :, None], old) for one, old in zip(new, before, strict=True))
    equal = all(np.array_equal(one, left) for one, left in zip(expected, after, strict=True))
    return equal and bool((changed.sum(axis=-1) <= 1).all())


@dataclass(frozen=True)
class _Shown:
    """One side's tensors, as an executor shows them."""

    values: Values

    def exposed(self, name: str) -> Array:
        """Return a tensor."""
        return self.values[name]


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
