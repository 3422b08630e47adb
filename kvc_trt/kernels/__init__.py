"""The CUDA kernels, called from Python: `KernelLibrary` over the C ABI, and `torch.ops.kvc` on top of it."""
