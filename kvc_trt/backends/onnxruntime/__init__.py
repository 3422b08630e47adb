"""ONNX Runtime on the CPU: the embedded default."""
