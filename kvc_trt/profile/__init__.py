"""What an engine costs: the physical floor, and the measurements compared with it."""
