"""The page of a run: its figures, its tables and the choice in words."""
