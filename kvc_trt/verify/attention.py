"""Exact attention over somebody's own choice of tokens: what is right once the choice is granted."""

from __future__ import annotations

import torch

from kvc_trt import reference


def attend_selected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor
) -> torch.Tensor:
    """Exact attention over given tokens: query [B,H,D], caches [B,G,C,D], selected [B,G,k] (-1 for none) -> [B,H,D]."""
    batch, groups = keys.shape[:2]
    grouped = query.reshape(batch, groups, -1, query.shape[-1])
    output = torch.empty_like(grouped)
    for row in range(batch):
        for head in range(groups):
            index = selected[row, head][selected[row, head] >= 0].long().clamp(max=keys.shape[2] - 1)
            output[row, head] = reference.dense_attention(
                grouped[None, row, head],
                keys[None, row, head, None, index].reshape(1, 1, -1, keys.shape[-1]),
                values[None, row, head, None, index].reshape(1, 1, -1, keys.shape[-1]),
                torch.tensor([len(index)]),
            )[0]
    return output.reshape(query.shape)
