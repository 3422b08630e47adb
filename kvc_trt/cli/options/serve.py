"""The command line of `kvc-trt serve`: which options go together, and the load that they let an engine accept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvc_trt.files.cache import cache_root
from kvc_trt.serving.engine import ServingSettings

if TYPE_CHECKING:
    from kvc_trt.serving.dynamo.deployment import Role


@dataclass(frozen=True)
class ServeArguments:
    """Every argument and option, by its parameter's name."""

    engines: tuple[str, ...]
    host: str
    port: int
    origins: tuple[str, ...]
    on_dynamo: bool
    on_triton: bool
    role: Role
    store: Path | None
    rows: int | None
    queue: int | None
    prefill_slice_ms: float | None
    backend: str | None
    threads: int | None
    tool_parser: str | None
    sealed: bool
    kv_proofs: bool

    @property
    def needs_dynamo(self) -> bool:
        """True if NVIDIA Dynamo serves: it is asked for, or a store or a role other than aggregated is given."""
        return self.on_dynamo or self._apart

    @property
    def shared_store(self) -> Path | None:
        """The store in which processes find each other; None if those that are started here are alone."""
        return cache_root() / "serving" if self.store is None and self.role != "aggregated" else self.store

    @property
    def settings(self) -> ServingSettings:
        """The load that each engine accepts."""
        return ServingSettings(
            self.rows,
            self.queue,
            prefill_slice_ms=self.prefill_slice_ms,
            threads=self.threads,
            backend=self.backend,
            kv_proofs=self.kv_proofs,
            sealed=self.sealed,
        )

    def check(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.on_triton and self.needs_dynamo:
            raise click.UsageError("--triton has no roles: separate prefill and decode processes need NVIDIA Dynamo")
        if self.on_triton and (self.origins or self.tool_parser is not None):
            raise click.UsageError("--cors and --tool-parser are for OpenAI's API, not for --triton")
        if self.role == "frontend" and (self.settings != ServingSettings() or self.tool_parser is not None):
            raise click.UsageError("--role frontend runs no engine; options of engines are for prefill and decode")
        if self.role in ("prefill", "decode") and self.origins:
            raise click.UsageError(f"--role {self.role} takes no requests from clients; --cors is for --role frontend")

    @property
    def _apart(self) -> bool:
        return self.role != "aggregated" or self.store is not None
