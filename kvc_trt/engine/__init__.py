"""The engine directory: its files, how it is written atomically, and how it is checked before loading."""

from kvc_trt.engine.directory import EngineDirectory

__all__ = ["EngineDirectory"]
