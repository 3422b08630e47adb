"""Caches that have a format: which codes stand for which vectors, in operators alone and in the whole engine."""
