"""Grammars: the texts that an answer may be, applied as a mask over the logits of each token."""
