"""Evaluation tasks: pure generators of prompts and expected answers."""
