"""A whole decoder from the reference's parts: layers, experts, and rules for what its caches keep and read."""
