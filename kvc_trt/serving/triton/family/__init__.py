"""TensorRT-LLM's family of four Triton models, whose names its clients use."""
