"""The cost of an engine: the physical floor, and the measurements compared with it."""
