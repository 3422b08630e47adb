"""A whole decoder from the reference's parts: layers, experts, and rules for the tokens that its caches keep and
read."""
