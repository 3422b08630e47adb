"""Replay a KV proof and report what was found."""
