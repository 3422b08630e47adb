"""Throughput and latency of many requests at once, through the scheduler, beside the dense twin in the same memory."""
