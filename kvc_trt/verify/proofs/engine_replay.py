"""Run the engine itself along the tokens of a proof, if it rounds too coarsely to be judged by the reference.

A quantised engine rounds activations, and the reference does not, so their lists differ although neither is wrong. Run
again, the engine chooses the same lists; and each of its choices is compared with the reference's on the same inputs,
as in `verify`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import engine_program
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import observe
from kvc_trt.verify.rankings.index_lists import IndexComparison

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.proof import Proof
    from kvc_trt.proof.lists import Lists
    from kvc_trt.verify.codes.stored_tokens import StoredTokens


@dataclass(frozen=True)
class EngineReplay:
    """The engine's choices, compared with the policy's rule on the inputs of its operators."""

    kept: dict[int, Lists]
    """Per cache that evicts tokens of a prompt: the kept positions, [heads,.]."""
    read: dict[int, list[Lists]]
    """Per cache that is read in part: the slots that each step reads, [heads,.]."""
    judged: IndexComparison
    tokens: StoredTokens | None = None
    """The tokens that the engine's caches stored, if the caches have a format."""

    def lists(self, cache: int, step: int) -> Lists | None:
        """Return the lists of a cache at a step, 0 for the prompt; None if the engine has none."""
        if step == 0:
            return self.kept.get(cache)
        read = self.read.get(cache, [])
        return read[step - 1] if step <= len(read) else None


def replay_by_engine(engine: EngineDirectory, proof: Proof) -> EngineReplay | str:
    """Run the engine along a proof's tokens on this machine; a str is the reason why that is impossible."""
    limits = engine_program(engine).limits
    try:
        harness = harness_for(engine, RunOptions(prefill_precision=proof.made_by.prefill_precision))
        batch = batch_of([proof.prompt_token_ids], limits.prompt_block)
        tokens = np.array(proof.fed, np.int64).reshape(-1, 1)
        found = observe(engine, harness, batch, len(tokens), tokens=tokens)
    except (InputError, UnsupportedEnvironment) as error:
        return error.message
    return EngineReplay(
        {cache: kept[0] for cache, kept in found.kept.items()},
        {cache: [lists[0] for lists in read] for cache, read in found.read.items()},
        found.compaction + found.selection,
        found.tokens,
    )
