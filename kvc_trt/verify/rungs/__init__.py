"""The rungs of verification, from single operators up to whole tasks, and the controls."""
