"""The command as a process: how it ends in time, and how it copes with broken streams and a machine out of memory or
disk."""
