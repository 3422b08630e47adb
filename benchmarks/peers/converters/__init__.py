"""Converters from the shared checkpoint to the file that one engine reads; each runs in that engine's environment."""
