"""The parts that methods are made of: budgets, constants, kinds of eviction and of selection, and their registry."""
