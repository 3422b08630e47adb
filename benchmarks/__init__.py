"""Measurements: each benchmark runs as `python -m benchmarks.NAME` in the root of a checkout."""
