"""The cost of 8 and 4 bits beside the cost of policies, at equal bytes."""
