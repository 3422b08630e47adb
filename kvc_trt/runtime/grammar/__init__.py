"""Grammars: what text an answer may be, as a mask over the logits of each of its tokens."""
