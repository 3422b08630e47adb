"""What an engine costs: the physical floor, and what was measured beside it."""
