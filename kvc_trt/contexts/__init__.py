"""Compressed contexts of an engine: their fingerprint, their tensors, and the file that holds one."""

from kvc_trt.contexts.file import read_context, write_context
from kvc_trt.contexts.packing import RowPacking, packing_of

__all__ = ["RowPacking", "packing_of", "read_context", "write_context"]
