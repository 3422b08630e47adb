"""Rewrite a graph in memory before an executor loads it."""
