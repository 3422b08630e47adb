"""The score of a task that is scored by likelihood: how surprising the true continuation is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mean_negative_log_likelihood(logits: NDArray[np.float32], token_ids: Sequence[int]) -> float:
    """Mean over N tokens of -log p(token), in nats, from `logits` [N, vocab]: row i is what predicts token i.

    Row 0 comes from the prompt's last token, so the last token of a continuation need not be fed. ValueError where
    there are no tokens, or not one row for each.
    """
    if not len(token_ids) or len(logits) != len(token_ids):
        raise ValueError(f"{len(logits)} rows of logits for {len(token_ids)} tokens: expected one for each, at least 1")
    exact = logits.astype(np.float64)
    largest = exact.max(axis=-1)
    normaliser = largest + np.log(np.exp(exact - largest[:, None]).sum(axis=-1))
    return float(np.mean(normaliser - exact[np.arange(len(token_ids)), list(token_ids)]))
