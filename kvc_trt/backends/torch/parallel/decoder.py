"""The decoder of one rank: attention and feed-forward give partial sums, which are added over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from kvc_trt.backends.torch.model.decoder import TorchDecoder

if TYPE_CHECKING:
    from kvc_trt.models.sharding import Shard


class Collectives:
    """The collective operations of this process's group. `count` is the number that this rank has begun."""

    def __init__(self) -> None:
        self.count = 0

    def summed(self, x: Tensor) -> Tensor:
        """Add x over all ranks, in place."""
        self.count += 1
        distributed.all_reduce(x)
        return x

    def gathered(self, x: Tensor) -> Tensor:
        """Return x [N,width] of all ranks side by side, [N,ranks*width]."""
        self.count += 1
        size, (rows, width) = distributed.get_world_size(), x.shape
        found = x.new_empty(size * rows, width)
        distributed.all_gather_into_tensor(found, x.contiguous())
        return found.view(size, rows, width).transpose(0, 1).reshape(rows, size * width)


class ParallelDecoder(TorchDecoder):
    """A decoder over the shard of one rank. Every rank must run the same calls in the same order."""

    def __init__(self, *arguments: Any, shard: Shard, collectives: Collectives, **options: Any) -> None:
        super().__init__(*arguments, **options)
        first, size = shard.query_heads.start, shard.model.head_size
        self._own = slice((shard.output_heads.start - first) * size, (shard.output_heads.stop - first) * size)
        self._width, self._vocabulary = shard.vocabulary_width, shard.model.vocab_size
        self._together = collectives

    def _output(self, layer: int, attended: Tensor, x: Tensor | None) -> Tensor:
        return self._together.summed(super()._output(layer, attended[:, self._own], x))

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        return self._together.summed(super()._feed_forward(layer, x))

    def _project_to_vocabulary(self, x: Tensor) -> Tensor:
        own = super()._project_to_vocabulary(x)
        padded = functional.pad(own, (0, self._width - own.shape[1]))
        return self._together.gathered(padded)[:, : self._vocabulary].contiguous()


def join(rank: int, count: int, store: str, device: torch.device, timeout: float) -> None:
    """Meet the other ranks through a file, and stay their group: NCCL between GPUs, gloo between CPUs."""
    from datetime import timedelta

    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=distributed.FileStore(store, count),  # type: ignore[attr-defined]
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
