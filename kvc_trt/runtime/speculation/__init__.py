"""Speculation: drafts of the next tokens, and whether checking them saves time."""
