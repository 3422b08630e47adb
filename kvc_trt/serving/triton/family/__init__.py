"""TensorRT-LLM's family of four Triton models, which its clients ask by name."""
