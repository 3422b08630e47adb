"""Engines behind the servers that users already run."""
