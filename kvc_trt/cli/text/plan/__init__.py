"""Text of the answers of `kvc-trt plan`."""
