"""Peak resident memory of one phase of the work, so that the engine's and the reference's needs stay apart."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@contextlib.contextmanager
def peak_of(phase: str, peaks: dict[str, int]) -> Iterator[None]:
    """Record the largest resident size, in bytes, reached inside; the larger one if `phase` was there before.

    Where the kernel cannot reset the peak, it is that of the process so far.
    """
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)
    try:
        yield
    finally:
        peaks[phase] = max(peaks.get(phase, 0), _peak_bytes())


def _peak_bytes() -> int:
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
