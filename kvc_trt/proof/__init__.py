"""Proof of compression: the tokens that an engine's caches kept and read for one answer, as digests that anyone can
recompute."""

from kvc_trt.proof.file import document_of, read_proof, write_proof
from kvc_trt.proof.record import MadeBy, PromptRecord, Proof, ProofKind, Recorder

__all__ = ["MadeBy", "PromptRecord", "Proof", "ProofKind", "Recorder", "document_of", "read_proof", "write_proof"]
