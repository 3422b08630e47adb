"""The decoder in PyTorch around `torch.ops.kvc`: layers, steps, turns and weights."""
