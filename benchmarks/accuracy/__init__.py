"""Answers under every policy: of the shipped model, and of a second question about the same text."""
