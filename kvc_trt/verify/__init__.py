"""Is an engine right? From single operators up to whole tasks."""
