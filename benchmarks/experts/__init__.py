"""Layers of experts beside dense ones: their time, and which pages of a mapped file become resident."""
