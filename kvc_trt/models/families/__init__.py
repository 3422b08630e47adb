"""Families of decoders: each file maps a configuration and names of weights to the parts of a decoder."""
