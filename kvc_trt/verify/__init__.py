"""Verify that an engine is right, from single operators up to whole tasks."""
