"""The model's assumptions about an H100 or H200 SXM, each figure with its source. None was measured by this project.

Sources. GUIDE: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0.
HOPPER: Luo and others, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking"
(arXiv 2402.13499), measured on an H100 PCIe. SHEET: NVIDIA's data sheets. ASSUMED: a guess by experience, to be
replaced by the first measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt.profile.accelerators import Accelerator

ARCHITECTURE = "sm_90a"
MULTIPROCESSORS = 132  # SHEET
CLOCK = 1.755e9  # SHEET: boost clock; a GPU that is not held back by its power runs at up to 1.98 GHz
PEAK_ISSUE = 4.0  # GUIDE: four schedulers, one instruction of a warp each per clock
SUSTAINED_ISSUE = 0.7  # ASSUMED: share of the issue slots that code without long waits fills
COPY_SHARE = 0.92  # ASSUMED: of the published bandwidth, by a long copy; published runs of STREAM give 0.90 to 0.94
MULTIPROCESSOR_BYTES = 64.0  # HOPPER: bytes per clock that one multiprocessor takes from L2
EDGE_MICROSECONDS = 0.9  # ASSUMED: from the end of one kernel of a CUDA graph to the first instruction of the next
DEPENDENT_EDGE_MICROSECONDS = 0.4  # ASSUMED: the same where the next begins early and waits on the device
LOADED_LATENCY = 1.3  # ASSUMED: a load takes longer beside those of other warps than alone

# Clocks from issue to the first use of the result.
ARITHMETIC_LATENCY = 4.5  # ASSUMED: 4 for additions and products, 5 and more for others
LATENCY = {
    "LDS": 29.0,  # HOPPER
    "LDSM": 33.0,  # HOPPER: as LDS, in four parts
    "STS": 0.0,
    "ATOMS": 60.0,  # ASSUMED
    "SHFL": 24.0,  # ASSUMED
    "MUFU": 23.0,  # ASSUMED
    "I2F": 14.0, "F2I": 14.0, "I2FP": 6.0, "F2F": 14.0, "POPC": 14.0, "FLO": 14.0, "BREV": 14.0,  # ASSUMED
    "S2R": 25.0, "S2UR": 25.0, "CS2R": 10.0, "R2UR": 12.0, "VOTE": 12.0, "VOTEU": 12.0, "MATCH": 25.0,  # ASSUMED
    "LDC": 29.0, "ULDC": 12.0, "LDCU": 12.0,  # ASSUMED: the constant cache, warm
    "HMMA": 33.0,  # HOPPER: m16n8k16 with fp32 sums
    "BAR": 30.0,  # ASSUMED: beyond waiting for the other warps
    "WARPSYNC": 8.0, "BSYNC": 6.0,  # ASSUMED
    "MEMBAR": 500.0, "ERRBAR": 20.0,  # ASSUMED: a fence for the device waits for the block's stores
    "LD": 190.0, "ST": 0.0,  # HOPPER: shared memory of another block of the cluster, 180 clocks
    "UCGABAR_WAIT": 30.0,  # ASSUMED: as BAR, beyond waiting for the other blocks
    "STAS": 0.0, "SYNCS": 0.0,
}  # fmt: skip
CLUSTER_LATENCY = 190.0  # ASSUMED: from the arrival at a cluster's barrier to its end: a hop of HOPPER, or two
BYTES_LATENCY = 190.0  # ASSUMED: from the last asynchronous store to the end of the wait for it: a hop of HOPPER
BLOCK_FENCE_LATENCY = 30.0  # ASSUMED: as a barrier; it waits for no store to global memory
L2_LATENCY = 263.0  # HOPPER
DEVICE_LATENCY = 479.0  # HOPPER, on HBM2e

# Instructions of a warp that one multiprocessor starts per clock, where that is below PEAK_ISSUE.
UNITS = {
    "integer": ("IADD3", "IMNMX", "ISETP", "LOP3", "SHF", "LEA", "SEL", "VIADD", "VIMNMX", "VIADDMNMX", "IABS", "IMAD",
                "PRMT", "PLOP3", "I2FP"),
    "special": ("MUFU", "F2F", "F2I", "I2F", "POPC", "FLO", "BREV"),
    "memory": ("LDS", "STS", "LDSM", "STSM", "LDG", "STG", "LDGSTS", "ATOMS", "ATOMG", "RED", "SHFL", "LD", "ST",
               "STAS", "ATOM", "MATCH"),
    "tensor": ("HMMA",),
}  # fmt: skip
RATE = {
    "integer": 2.0,  # GUIDE: 64 lanes; that IMAD may take the floating-point units instead is not counted
    "special": 0.5,  # GUIDE: 16 lanes of MUFU, and of conversions between types of different sizes
    "memory": 1.0,  # GUIDE: 32 lanes of loads, stores, shuffles; a vector of 16 bytes takes four turns
    "tensor": 0.62,  # SHEET: 1 (m16n8k16 of 16-bit numbers); HOPPER: mma.sync reaches 62 % of that
}
UNIT = {name: unit for unit, names in UNITS.items() for name in names}

ERROR = (
    "Published models of this kind, fitted to the device that they describe, miss by 5 to 30 % (Hong and Kim 2009; "
    "GPUMech 2014). This one was fitted to nothing: expect it to miss by a third where bandwidth or issue slots "
    "decide, and by up to a factor of 2 where latency does, to either side. Which of two versions of a kernel is "
    "faster is more certain than either time."
)


def assumptions() -> dict[str, object]:
    """Return every figure that the predictions rest on; this file says where each is from."""
    return {
        "clock_hz": CLOCK,
        "multiprocessors": MULTIPROCESSORS,
        "issue_per_clock": PEAK_ISSUE * SUSTAINED_ISSUE,
        "units_per_clock": RATE,
        "latency_clocks": {
            **LATENCY,
            "other": ARITHMETIC_LATENCY,
            "L2": L2_LATENCY,
            "memory": DEVICE_LATENCY,
            "bytes": BYTES_LATENCY,
            "cluster": CLUSTER_LATENCY,
            "fence_of_block": BLOCK_FENCE_LATENCY,
        },
        "loaded_latency": LOADED_LATENCY,
        "copy_share_of_published_bandwidth": COPY_SHARE,
        "multiprocessor_bytes_per_clock": MULTIPROCESSOR_BYTES,
        "edge_us": EDGE_MICROSECONDS,
        "dependent_edge_us": DEPENDENT_EDGE_MICROSECONDS,
    }


@dataclass(frozen=True)
class Gpu:
    """One GPU as the model sees it."""

    accelerator: Accelerator

    @property
    def name(self) -> str:
        return self.accelerator.name

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a long copy is expected to reach."""
        return COPY_SHARE * self.accelerator.bandwidth
