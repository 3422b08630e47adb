"""Operators of a model's parts other than attention, one by one against the reference."""
