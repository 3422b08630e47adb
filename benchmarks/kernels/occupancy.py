"""The number of CTAs that one multiprocessor holds of a kernel, from its registers, threads and shared memory.

Limits per multiprocessor: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class Multiprocessor:
    """The resources that the CTAs of one multiprocessor share."""

    shared_bytes: int
    registers: int = 65536
    threads: int = 2048
    ctas: int = 32
    partitions: int = 4
    """Warp schedulers, each with its part of the registers."""
    reserved_shared: int = 1024
    """Shared memory that the system takes of every CTA."""


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(shared_bytes=164 * 1024),
    "sm_90a": Multiprocessor(shared_bytes=228 * 1024),
    "sm_100": Multiprocessor(shared_bytes=228 * 1024),
}


def resident_ctas(architecture: str, *, threads: int, registers: int, shared_bytes: int) -> int:
    """CTAs that fit at once; `shared_bytes` is the shared memory of one CTA, static and dynamic together."""
    limits = MULTIPROCESSORS[architecture]
    warps = _round_up(threads, WARP) // WARP
    per_warp = _round_up(max(registers, 1), 8) * WARP
    by_registers = limits.registers // limits.partitions // per_warp * limits.partitions // warps
    by_shared = limits.shared_bytes // _round_up(shared_bytes + limits.reserved_shared, 128)
    by_threads = limits.threads // (warps * WARP)
    return min(by_registers, by_shared, by_threads, limits.ctas)


def occupancy(architecture: str, *, threads: int, registers: int, shared_bytes: int) -> float:
    """Return the share of the multiprocessor's threads that resident CTAs fill."""
    ctas = resident_ctas(architecture, threads=threads, registers=registers, shared_bytes=shared_bytes)
    return ctas * _round_up(threads, WARP) / MULTIPROCESSORS[architecture].threads


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
