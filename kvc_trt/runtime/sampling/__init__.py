"""Sampling: choose each token of one answer from the logits, and turn tokens into text."""
