"""PyTorch around the kernels: an engine's weights, `torch.ops.kvc` for compaction and decode attention."""
