"""Prefill and decode on different machines: hand a compacted cache from one worker to another."""
