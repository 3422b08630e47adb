"""NVIDIA Dynamo: its frontend in front of engines, each in a worker process of its own."""
