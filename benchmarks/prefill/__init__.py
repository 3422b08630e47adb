"""Time and memory of prefill: whole, in slices, and with budgets divided among layers."""
