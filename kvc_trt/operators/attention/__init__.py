"""The operators of prefill and decode attention."""
