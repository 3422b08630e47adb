"""Rankings: prove in float64 that two choices of tokens differ only within rounding."""
