"""Time, hardware counters and machine code of the CUDA kernels."""
