"""The header of a context, in a file or a handoff: the engine that made it, and its lengths."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from kvc_trt.contexts.packing import RowPacking
from kvc_trt.methods.base.constants import CacheFormatName
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.runtime.context import Context, Fingerprint
from kvc_trt.validation import OwnSchema
from kvc_trt.version import __version__

FORMAT: Final = 1

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,200}$")]
"""Printed to terminals, so without anything that could control one."""
Count = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]


class ContextHeader(OwnSchema):
    """The JSON document of a context."""

    version: Literal[1]
    written_by: Name
    engine: Digest
    weights: Digest
    model: Digest
    parameters: Digest
    state: Digest
    compatibility: Digest
    model_name: Name
    policy_name: Name
    kv_cache: CacheFormatName = AUTO
    logical_length: Count
    cache_lengths: list[Count]
    tokens: Digest

    @model_serializer(mode="wrap")
    def _omit_default_format(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `kv_cache` where it is the default, since readers of earlier versions do not know it."""
        fields: dict[str, Any] = written(self)
        return {name: value for name, value in fields.items() if (name, value) != ("kv_cache", AUTO)}

    @property
    def fingerprint(self) -> Fingerprint:
        """The identity of the engine that made the context."""
        return Fingerprint(**{field.name: getattr(self, field.name) for field in fields(Fingerprint)})


def header_of(context: Context) -> ContextHeader:
    """Return the document of a context."""
    made_by = context.fingerprint
    return ContextHeader(
        version=FORMAT,
        written_by=f"kvc-trt {__version__}",
        **asdict(made_by),
        compatibility=made_by.compatibility,
        logical_length=context.logical_length,
        cache_lengths=list(context.cache_lengths),
        tokens=context.token_digest,
    )


def check_lengths(header: ContextHeader, packing: RowPacking, what: str) -> None:
    """Raise InputError, naming `what`, for lengths that no row of the engine can have."""
    packing.limits.check_lengths(header.logical_length, header.cache_lengths, what)
