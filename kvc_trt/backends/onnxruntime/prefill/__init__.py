"""Prefill in parts and slices, and prefill that several engines share."""
