"""The command line: one module per command, each with a `command`; nothing here is imported by the library."""
