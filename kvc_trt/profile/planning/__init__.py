"""Plan the memory and the floor of an engine from its shapes alone."""
