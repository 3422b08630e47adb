"""The prompts and questions that verification puts to an engine."""
