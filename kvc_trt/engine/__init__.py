"""The engine directory: what a build produces, how it is written whole, and how it is checked before anything loads."""

from kvc_trt.engine.directory import EngineDirectory

__all__ = ["EngineDirectory"]
