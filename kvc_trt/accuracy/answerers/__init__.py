"""Answerers: engines, the PyTorch reference, and the models that are compared."""
