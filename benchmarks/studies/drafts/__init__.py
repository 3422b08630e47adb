"""Drafts of an answer under SnapKV and the whole cache, over the length of a prompt: in the place of Medusa heads."""
