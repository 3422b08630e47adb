"""The experts that an engine chose for the tokens of a batch, and the reference that goes on from them at near-ties.

Where two experts nearly tie, rounding decides between them, and from there on results differ although neither side is
wrong. So the engine exposes what its routers read. The reference's rule for experts, applied to that, gives the choice
that the engine had to make: an operator that makes another one is found by its result. Where this choice is not the
one that the reference makes on its own activations, their router logits must lie within twice the bar of logits (each
may be off by the bar); the reference then goes on from the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.models.weights import ROUTER, ROUTER_BIAS
from kvc_trt.reference.model.experts import routed
from kvc_trt.reference.selection import best
from kvc_trt.verify.checks import Check

if TYPE_CHECKING:
    from kvc_trt.backends.harness import Harness
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.verify.codes.stored_tokens import Exposing


@dataclass
class Routes:
    """The experts of one batch's tokens, layer by layer, in the order in which the reference takes tokens in."""

    model: ModelConfig
    weights: WeightSource
    inputs: Mapping[str, Mapping[int, str]]
    """The name of what each layer's router reads, by graph."""
    chosen: dict[int, list[Tensor]] = field(default_factory=dict)
    """By layer: int64 [N,chosen] of each prompt, and of each later run."""
    _routers: dict[int, tuple[Tensor, Tensor | float]] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: EngineDirectory, target: Harness, *graphs: str) -> Routes | None:
        """Return an empty record for the runs of these graphs on `target`.

        None if no layer has experts, if `target` does not show what routers read, or if the reference reads prompts
        twice, since their cosines divide the budget.
        """
        inputs = {graph: target.routers(graph) for graph in graphs}
        if engine.parameters.squeeze_share is not None or not all(inputs.values()):
            return None
        return cls(engine.model, engine.weights(), inputs)

    def names(self) -> set[str]:
        """Return the values that the executor must expose."""
        return {name for of_graph in self.inputs.values() for name in of_graph.values()}

    def after_block(self, executor: Exposing, lengths: NDArray[np.int64], *, graph: str = "prefill") -> None:
        """Record the experts of prompts, or of a turn of the extend graph, of `lengths` [B]."""
        for layer, read in self._read(executor, graph):
            rows = read.reshape(len(lengths), -1, self.model.hidden_size)
            self._record(layer, np.concatenate([row[:count] for row, count in zip(rows, lengths, strict=True)]))

    def after_step(self, executor: Exposing) -> None:
        """Record the experts of one token of each row."""
        for layer, read in self._read(executor, "decode"):
            self._record(layer, read)

    def after_draft(self, executor: Exposing, rows: int, kept: int) -> None:
        """Record the experts of the first `kept` tokens of each row's draft."""
        for layer, read in self._read(executor, "draft"):
            self._record(layer, read.reshape(-1, self.model.hidden_size)[: kept * rows])

    def _read(self, executor: Exposing, graph: str) -> list[tuple[int, NDArray[Any]]]:
        return [(layer, executor.exposed(name)) for layer, name in self.inputs[graph].items()]

    def _record(self, layer: int, read: NDArray[Any]) -> None:
        if layer not in self._routers:
            clamped = self.model.description.clamped_gate is not None
            names = [f"model.layers.{layer}.{name}" for name in (ROUTER, *([ROUTER_BIAS] if clamped else []))]
            router, *bias = (torch.from_numpy(self.weights.read(name).astype(np.float32)) for name in names)
            self._routers[layer] = router, bias[0] if bias else 0.0
        part = self.model.experts(layer)
        assert part is not None
        router, offset = self._routers[layer]
        logits = torch.from_numpy(read.reshape(-1, self.model.hidden_size).astype(np.float32)) @ router.T + offset
        self.chosen.setdefault(layer, []).append(routed(logits, part.chosen, normalised=part.normalised)[0])


class FollowedRoutes:
    """Chooses the experts of the reference's tokens as the engine did, and judges each choice unlike its own."""

    def __init__(self, routes: Routes, bar: float) -> None:
        """Two router logits of a token may trade places within `bar` times the largest of them (at least 1)."""
        self.tokens, self.unlike = 0, 0
        self.widest = 0.0
        """The largest distance between router logits that traded places, in parts of the token's largest."""
        self.wrong: list[str] = []
        self._bar = bar
        self._chosen = {layer: torch.cat(runs) for layer, runs in routes.chosen.items()}
        self._next = dict.fromkeys(self._chosen, 0)

    def __call__(self, layer: int, logits: Tensor, count: int) -> Tensor:
        """Return the experts int64 [N,count] of the next N tokens of a layer, from the reference's logits [N,experts].

        A choice that no near-tie explains is noted, and the reference's own is returned in its place, as it is for
        tokens that the engine's run did not reach."""
        own = best(logits, count)
        if layer not in self._chosen:
            self.wrong.append(f"layer {layer}: the engine has no experts")
            return own
        start = self._next[layer]
        recorded = self._chosen[layer][start : start + len(logits)]
        theirs = torch.cat([recorded, own[len(recorded) :]])
        self._next[layer] += len(logits)
        shared = own[:, :, None] == theirs[:, None]
        left = logits.gather(1, own).masked_fill(shared.any(dim=2), -torch.inf).amax(dim=1)
        taken = logits.gather(1, theirs).masked_fill(shared.any(dim=1), torch.inf).amin(dim=1)
        off = (left - taken) / logits.abs().amax(dim=1).clamp(min=1.0)
        differs = ~shared.any(dim=2).all(dim=1)
        beyond = differs & ~(off <= self._bar)
        self.tokens += len(recorded)
        self.unlike += int(differs.sum())
        if differs.any():
            self.widest = max(self.widest, float(off[differs].max()))
        for token in beyond.nonzero().flatten().tolist():
            self.wrong.append(
                f"layer {layer}, token {start + token}: {theirs[token].tolist()}, reference {own[token].tolist()}"
            )
        return torch.where(beyond[:, None], own, theirs)

    def check(self, what: str = "") -> Check:
        """Return the check of all choices, whose name begins with `what` they were made in."""
        return Check(
            f"{what}experts unlike the reference's own run",
            f"{self.tokens} choices",
            f"{len(self.wrong)} wrong",
            "<= 0 wrong",
            not self.wrong,
            "; ".join(self.wrong[:3]) or f"{self.unlike} near-ties, at most {self.widest:.1g} apart",
            f"near-ties within {self._bar:g} of a token's largest router logit; forced on the reference",
        )
