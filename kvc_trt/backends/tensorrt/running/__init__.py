"""Load TensorRT plans and run them: device memory, contexts, steps and turns."""
