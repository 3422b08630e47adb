"""The TensorRT executor: the same two graphs, compiled by NVIDIA's builder with our CUDA plugins.

Nothing here imports TensorRT when it is imported; only what builds or runs an engine does.
"""
