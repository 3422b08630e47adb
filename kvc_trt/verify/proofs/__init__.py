"""Replay a KV proof and report whether it is true."""
