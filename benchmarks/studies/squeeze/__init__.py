"""SqueezeAttention's study of its three policies with and without budgets by layer: answers, memory, speed, cost."""
