"""The tasks, one file each: a file that defines `TASKS` is found by the registry."""
