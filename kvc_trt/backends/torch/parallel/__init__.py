"""Tensor parallelism for PyTorch: one process per GPU, each with its KV heads and its part of every matrix."""
