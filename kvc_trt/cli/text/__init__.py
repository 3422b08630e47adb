"""The text that commands print."""
