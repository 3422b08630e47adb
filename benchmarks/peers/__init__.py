"""kvc-trt beside the engines that people would use instead on a CPU: the same weights, one machine, one run.

    python -m benchmarks.peers --help

One file per engine in `converters/` and `runners/`; `contenders.py` names every configuration that is measured. Each
measurement is a process of its own, so its peak memory is its own, and the contenders take turns, round after round.
"""
