"""Check the codes of caches that have a format, in single operators and in the whole engine."""
