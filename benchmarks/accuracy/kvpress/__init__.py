"""The same questions, answered by transformers and NVIDIA kvpress."""
