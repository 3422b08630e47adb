"""The version of kvc-trt: recorded in every engine, and read from here by the package's metadata."""

__version__ = "0.1.0"
