"""Importance of layers: SqueezeAttention's study of the cosine around attention, and of what follows from it."""
