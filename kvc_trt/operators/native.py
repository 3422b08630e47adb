"""What kvc-trt and a library of native operators (plugins_cpu/) have to agree on."""

INTERFACE = 1
"""Number of the interface. It rises when the schema of a native operator or a function of the library changes."""
