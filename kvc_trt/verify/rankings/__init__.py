"""Prove that two selections of tokens are the same choice, or differ only within rounding."""
