"""Everything recorded of caches in formats, read together: our answers, those of kvpress and OpenVINO, divergences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.accuracy.formats import answers, divergence
from benchmarks.accuracy.formats.methods import METHODS, in_format
from benchmarks.accuracy.kvpress import answers as kvpress
from benchmarks.accuracy.paired import difference
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, questions, read
from benchmarks.accuracy.smollm2.grid import MODEL
from kvc_trt.accuracy.cell import Mean
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import BASELINE

OPENVINO = "OpenVINO"
EVICTION = "peers-eviction"
"""The result of `benchmarks.peers.eviction_answers`, which runs where OpenVINO GenAI is installed."""
OPENVINO_EXTRA = 8
"""Bytes of scale and zero point of a vector in OpenVINO's u8 cache, its default; the codes are a byte a channel."""


@dataclass(frozen=True)
class Divergences:
    """Figures of one cache along texts of one length."""

    row_bytes: int
    from_whole: tuple[float, ...]
    """Nats per token, by text: from the whole fp32 cache."""
    from_own: tuple[float, ...]
    """Divergence from the same method's fp32 cache."""
    equal: tuple[float, ...]
    """Share of the tokens for which the whole fp32 cache finds the same one most likely."""


@dataclass(frozen=True)
class Formats:
    """Everything that is known."""

    answered: Comparison
    """Ours and kvpress's."""
    eviction: Mapping[str, Any]
    """OpenVINO's result, empty where there is none."""
    diverged: Mapping[str, Any]
    """The result of `divergence`, empty where there is none."""

    @property
    def groups(self) -> list[Group]:
        """Return the groups that were asked, in the order of `answers.GROUPS`."""
        return self.answered.groups

    def cell(self, group: Group, method: str, form: str, budget: int | None) -> Answered | None:
        """One of our cells, if it was asked."""
        point = BASELINE if budget is None else f"budget {budget}"
        return self.answered.cell(OURS, group, in_format(method, form), point)

    def pairs(self, group: Group, form: str) -> Iterator[tuple[Answered, Answered]]:
        """Yield every method and budget in fp32 and in a format, where both were asked."""
        for method, budget in caches():
            own, other = (self.cell(group, method, one, budget) for one in ("auto", form))
            if own is not None and other is not None:
                yield own, other

    def openvino(self, group: Group) -> list[Answered]:
        """OpenVINO's answers to a group's questions, if it was asked them: whole, and with its eviction."""
        model, found = load_preset(MODEL).config, []
        vectors = 2 * model.num_hidden_layers * model.num_key_value_heads
        for cell in self.eviction.get("cells", ()):
            place = Group(cell["task"], cell["mode"], cell["length"], cell["framing"])
            if place == group and questions(cell["dataset"]) in self._asked(group):
                tokens = cell["stored_tokens"]
                stored = (tokens or group.length) * vectors * (model.head_size + OPENVINO_EXTRA)
                point = BASELINE if tokens is None else f"{tokens} tokens"
                found.append(Answered(OPENVINO, group, "u8", point, stored, tuple(cell["scores"]), likelihood=False))
        return found

    def beside_whole(self, cell: Answered) -> Mean | None:
        """Return a cell minus our whole fp32 cache on the same questions; None where that was not asked."""
        whole = self.answered.full(cell.group)
        return None if whole is None else difference(cell.scores, whole.scores)

    def _asked(self, group: Group) -> set[str]:
        place = group._asdict()
        cells = self.answered.ours["cells"]
        return {questions(one["dataset"]) for one in cells if all(one[name] == value for name, value in place.items())}

    @property
    def lengths(self) -> list[int]:
        """Lengths of the texts along which divergences are known."""
        return sorted({one["length"] for one in self.diverged.get("prompts", ())})

    @property
    def followed(self) -> list[tuple[int, str]]:
        """Lengths and methods of which divergences are known."""
        known = {(one["length"], one["method"]) for one in self.diverged.get("prompts", ())}
        return [(length, method) for length in self.lengths for method in METHODS if (length, method) in known]

    def divergences(self, length: int, method: str, form: str) -> Divergences:
        """Return the figures of one cache along all texts of a length; none where it was not asked."""
        place, prompts = list(CACHE_FORMATS).index(form), self.diverged.get("prompts", ())
        found = [one["caches"][place] for one in prompts if (one["method"], one["length"]) == (method, length)]
        names = ("divergence", "divergence_from_own", "equal")
        size = found[0]["row_bytes"] if found else 0
        return Divergences(size, *(tuple(one[name] for one in found) for name in names))


def caches() -> list[tuple[str, int | None]]:
    """Return every method with every budget that it was asked at."""
    return [(name, budget) for name in METHODS for budget in ((None,) if name == BASELINE else answers.BUDGETS)]


def recorded(results: Path = store.RESULTS) -> Formats:
    """Return the results in a folder. InputError where the answers are to different questions."""

    def known(name: str) -> dict[str, Any]:
        path = results / f"{name}.json"
        return store.read(path) if path.is_file() else {}

    ours = results / f"{answers.NAME}.json"
    if not ours.is_file():
        raise SystemExit(f"error: no {ours}; python -m benchmarks.accuracy.formats.answers measures")
    compared = read(ours, results / f"{kvpress.NAME}.json")
    return Formats(compared, known(EVICTION), known(divergence.NAME))


def peers(found: Formats, group: Group) -> Sequence[Answered]:
    """Return the answers of other engines to a group's questions."""
    return [*found.answered.of(KVPRESS, group), *found.openvino(group)]
