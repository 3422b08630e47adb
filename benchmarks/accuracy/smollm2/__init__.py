"""Answers of SmolLM2-135M-Instruct under every policy, beside kvpress's presses."""
