"""What can run an engine: one package per executor, and the choice between them."""

from kvc_trt.backends.selection import Backend, select_backend

__all__ = ["Backend", "select_backend"]
