"""The model under test, and what answers for it: its engines, one for each policy, or the PyTorch reference."""
