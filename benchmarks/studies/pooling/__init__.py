"""Pooling, kernels and windows of SnapKV on needles."""
