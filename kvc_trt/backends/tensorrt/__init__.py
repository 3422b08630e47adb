"""The TensorRT backend: the same two graphs, compiled by NVIDIA's builder with our CUDA plugins.

Importing the package does not import TensorRT; only building or running an engine does.
"""
