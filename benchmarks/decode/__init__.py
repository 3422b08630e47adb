"""Decode steps of ONNX Runtime's engines, and their page."""
