"""The scheduler: many callers share one session."""
