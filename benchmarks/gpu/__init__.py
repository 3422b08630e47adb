"""The GPU that sweeps measure, its emulation on a CPU, and their results point by point."""
