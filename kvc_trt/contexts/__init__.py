"""Compressed contexts of an engine: their fingerprint, their tensors, and the file that holds one."""

from typing import TYPE_CHECKING

from kvc_trt.contexts.packing import RowPacking, packing_of
from kvc_trt.lazy import lazy_names

if TYPE_CHECKING:
    from kvc_trt.contexts.file import read_context, write_context
else:
    __getattr__ = lazy_names(__name__, dict.fromkeys(("read_context", "write_context"), "kvc_trt.contexts.file"))

__all__ = ["RowPacking", "packing_of", "read_context", "write_context"]
