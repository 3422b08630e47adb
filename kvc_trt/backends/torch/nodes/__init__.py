"""Run ONNX nodes in PyTorch, for the parts of a policy that have no kernels."""
