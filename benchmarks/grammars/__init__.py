"""Masks of grammars: how long one takes, and how long a token waits for it."""
