"""RocketKV-MT: RocketKV for conversations. Every token is kept, and each turn chooses anew which of them steps read.

"RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression", arXiv 2502.14051, second
version. Stage 1 runs after the prompt and after every turn, with a window of 128 queries, over all tokens of the
conversation; the tokens that it admits are copied into RocketKV's own cache, from which stage 2 selects until the next
turn. Tokens of the answer are admitted as they come. So a later question is answered from everything, and only traffic
is saved, not memory.

Shapes: RocketKV's cache [B,G,C,D], and beside it keys and values of every token [B,G,S,D] by position. A turn of a
conversation attends exactly to all of these.

Deviations: that the whole cache is kept, the window of 128 and the choice per turn are published. It could not be
confirmed whether answers of earlier turns compete (here they do), whether only the turn's own queries vote (here they
do), and how the released code stores admitted tokens (here they are copied, so that pages are those of the admitted
tokens).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.graph_context import PromptLayer, StepLayer, store_rows
from kvc_trt.methods.base.inputs import PolicyInputs
from kvc_trt.methods.base.isolated_runs import Array
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.hybrid import BestOfPages
from kvc_trt.methods.rocketkv import ROCKETKV
from kvc_trt.methods.rocketkv import resolve as resolve_rocketkv
from kvc_trt.methods.snapkv_plus_plus import OBSERVED_ATTENTION, ByWindow
from kvc_trt.operators.schema import CACHE, Tensor
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.operators.turns.append_block import APPEND_BLOCK

if TYPE_CHECKING:
    import torch

    from kvc_trt.methods.base.graph_context import TurnLayer
    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, Turn
    from kvc_trt.reference.model.rules import PromptQueries

WINDOW = 128
WHOLE = (
    Tensor("k_whole", CACHE, ("B", "G", "L", "D"), "keys of every token, by position", stored="keys"),
    Tensor("v_whole", CACHE, ("B", "G", "L", "D"), stored="values"),
)


class AdmittedAnew(PromptEviction):
    """Keep every token beside the cache that steps read, and admit to that cache the tokens that the last queries
    attend to."""

    name = "admitted-per-turn"
    any_softmax = True
    operators = None
    keeps_whole = True
    turn = (
        "Every token is kept, which takes the memory of the whole cache; the last queries of the turn choose anew "
        "which of them the next steps may read."
    )

    @override
    def observe(self, queries: PromptQueries, prompt_lengths: torch.Tensor, rule: Constants) -> Any:
        return queries.observed

    @override
    def compact(
        self, observed: Any, keys: torch.Tensor, values: torch.Tensor, prompt_lengths: torch.Tensor,
        rule: Constants,
    ) -> Compacted:  # fmt: skip
        """Admit the tokens that SnapKV++ keeps of a prompt."""
        return OBSERVED_ATTENTION.compact(observed, keys, values, prompt_lengths, rule)

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """Write the tokens that SnapKV++ keeps, and the whole prompt beside them."""
        OBSERVED_ATTENTION.store(prompt, bounds=bounds)
        slots = prompt.rule.max_sequence_len
        if prompt.rule.cache_format.keys is not None:
            prompt.store_tokens(prompt.keys, prompt.values, WHOLE, capacity=slots)
        else:
            store_rows(prompt, slots, prompt.named([tensor.name for tensor in WHOLE]))

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        """Admit the tokens that SnapKV++ keeps of the whole conversation."""
        return OBSERVED_ATTENTION.compact_turn(turn, rule)

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        """Append to the whole cache, attend to it, and write the compaction of a turn over it."""
        start, count = turn.turn.positions, turn.batch.lengths
        tables = turn.append_to(*WHOLE, start)
        given = {
            "q_window": turn.window(), **tables, "prompt_lengths": turn.emit.Add(start, count),
            "window_lengths": turn.turn.window_lengths, **turn.turn.by_length,
        }  # fmt: skip
        attended = turn.attend(tables, start)
        operator = OBSERVED_ATTENTION.turns_operator(turn.rule)
        turn.call(operator, given, turn.compacted(operator, bounds=bounds, indices="indices"))
        return attended

    @override
    def describe(self, rule: Constants) -> str:
        return f"{OBSERVED_ATTENTION.describe(rule)}, chosen anew by every turn from all {rule.max_sequence_len:,} kept"

    @override
    def ranking(self, rule: Constants) -> ByWindow:
        """Return the ranking by the window's pooled attention."""
        return OBSERVED_ATTENTION.ranking(rule)


class BestOfAdmitted(BestOfPages):
    """Select from the admitted tokens as RocketKV does; the new token is stored in both caches."""

    name = "hybrid-of-admitted"

    @property
    @override
    def state(self) -> tuple[Tensor, ...]:
        """The page bounds, and the whole cache."""
        return (*super().state, *WHOLE)

    @override
    def state_of(self, keys: Array, values: Array, lengths: Array, rule: Constants) -> dict[str, Array]:
        """Make the page bounds, and whole caches [B,G,L,D] of a text of which nothing was left out."""
        made = super().state_of(keys, values, lengths, rule)
        for tensor, entries in zip(WHOLE, (keys, values), strict=True):
            rows, heads, slots, size = entries.shape
            made[tensor.name] = np.zeros((rows, heads, rule.max_sequence_len, size), entries.dtype)
            made[tensor.name][:, :, :slots] = entries
        return made

    @override
    def decode(self, step: StepLayer) -> Value:
        """Write RocketKV's step, and append to the whole cache."""
        emit, position = step.emit, step.batch.positions
        tables = dict(zip(step.parts(K_CACHE, V_CACHE), step.parts(*WHOLE), strict=True))
        inputs = {
            "k_new": emit.Unsqueeze(step.key, [2]), "v_new": emit.Unsqueeze(step.value, [2]),
            "cache_lengths": position, "lengths": emit.Expand(1, emit.Shape(position)),
            **{part: step.state(own) for part, own in tables.items()},
        }  # fmt: skip
        names = {f"{part}_out": step.updated(own) for part, own in tables.items()}
        step.call(APPEND_BLOCK, inputs, names)
        return super().decode(step)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive RocketKV's numbers with a window of 128."""
    return replace(resolve_rocketkv(inputs), prompt_eviction=ADMITTED_ANEW.name, decode_selection=BEST_OF_ADMITTED.name)


ADMITTED_ANEW, BEST_OF_ADMITTED = AdmittedAnew(), BestOfAdmitted()
ROCKETKV_MT = Policy(
    name="rocketkv-mt",
    summary="rocketkv for conversations: every token stays, and each turn chooses which ones steps may read",
    source="RocketKV-MT, arXiv 2502.14051 (second version)",
    eviction=ADMITTED_ANEW,
    selection=BEST_OF_ADMITTED,
    resolve=resolve,
    divides=True,
    overrides=ROCKETKV.overrides,
    fixed={"window": WINDOW},
)
