"""Importance of layers: SqueezeAttention's study of the cosine around attention, and of the budgets that follow from
it."""
