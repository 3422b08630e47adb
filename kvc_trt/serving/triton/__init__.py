"""Triton Inference Server: the model repository of an engine, and the Python model in it."""
