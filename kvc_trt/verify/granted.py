"""The reference under the engine's own choices, where rounding made the two choose differently.

A token swapped at a near-tie may carry much attention: from there on logits differ, although nobody computed wrongly.
So the choices are judged first, each on the reference's own inputs, and then granted; what is left is numerics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.verify.near_ties import IndexComparison
from kvc_trt.verify.reference_run import different_rows, replay

if TYPE_CHECKING:
    from kvc_trt.verify.subject import Subject

_JUDGED = ("dense", "hybrid")
"""Decode selections whose choices `near_ties` proves to be near-ties or not; of a prompt, those of one budget."""


@dataclass(frozen=True)
class Granted:
    """Reference logits [N+1,B,vocab] that the engine's are compared with."""

    logits: NDArray[np.float32]
    rows: tuple[int, ...] = ()
    """Rows of the batch that were run again under the engine's choices."""
    explained: IndexComparison | None = None
    """Those choices against the reference's own, within `choice_slack` times a near-tie's tolerance."""


def grant(subject: Subject) -> Granted:
    """Run the reference again where choices differ; nothing is granted to a graph that hides some of its choices, nor
    where nobody can judge them."""
    ours, seen = subject.reference_run, subject.observed.choices
    rules = [site.parameters for site in subject.sites]
    judged = all(rule.decode_selection in _JUDGED and rule.squeeze_share is None for rule in rules)
    if not judged or seen.keys() != subject.choosing_caches():
        return Granted(ours.logits)
    rows = tuple(sorted(different_rows(ours.choices, seen)))
    if not rows:
        return Granted(ours.logits)
    engine = subject.engine
    with subject.phase("reference"):
        again = replay(
            engine.model,
            engine.weights(),
            engine.parameters,
            subject.batch,
            subject.engine_run.tokens,
            seen,
            slack=subject.thresholds.choice_slack,
            progress=subject.progress,
        )
    logits = ours.logits.copy()
    logits[:, rows] = again.logits[:, rows]
    return Granted(logits, rows, again.explained)
