"""Build TensorRT plans from an engine's graphs."""
