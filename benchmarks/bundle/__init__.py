"""The bundle of a GPU's day (docs/gpu-day.md): made here by `make`, unpacked by `unpack` on a machine with a GPU."""
