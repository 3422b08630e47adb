"""Plan an engine's memory, and the least time of its steps, from its shapes alone."""
