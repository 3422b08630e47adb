"""Serve engines with NVIDIA Dynamo: its frontend, and a worker process for each engine."""
