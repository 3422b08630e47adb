"""The written-down model of a kernel's time on an H100 or H200. Nothing here was measured: see `__main__`."""
