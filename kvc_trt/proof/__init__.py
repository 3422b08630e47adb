"""Proof of compression: the tokens that an engine's caches kept and read for one answer, as digests that anyone can
recompute."""

from typing import TYPE_CHECKING

from kvc_trt.lazy import lazy_names
from kvc_trt.proof.record import MadeBy, PromptRecord, Proof, ProofKind, Recorder

if TYPE_CHECKING:
    from kvc_trt.proof.file import document_of, read_proof, write_proof
else:
    __getattr__ = lazy_names(
        __name__, dict.fromkeys(("document_of", "read_proof", "write_proof"), "kvc_trt.proof.file")
    )

__all__ = ["MadeBy", "PromptRecord", "Proof", "ProofKind", "Recorder", "document_of", "read_proof", "write_proof"]
