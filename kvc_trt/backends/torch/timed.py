"""A decoder that times its compactions: by the device's events on a GPU, on the host's clock elsewhere."""

from __future__ import annotations

import time
from typing import Any

import torch

from kvc_trt.backends.torch.decoder import TorchDecoder


class TimedDecoder(TorchDecoder):
    """`marks` holds what was noted in front of and behind every compaction since it was last cleared."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.marks: list[tuple[Any, Any]] = []

    def compaction_seconds(self) -> float:
        """All compactions together. On a GPU: once the device has finished them."""
        if self.on_gpu:
            return sum(float(start.elapsed_time(end)) for start, end in self.marks) / 1e3
        return float(sum(end - start for start, end in self.marks))

    def _compact(self, *arguments: Any) -> Any:
        start = self._now()
        found = super()._compact(*arguments)
        self.marks.append((start, self._now()))
        return found

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
