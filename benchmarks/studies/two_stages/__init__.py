"""RocketKV, stage by stage: the attention that each keeps and reads, and the cost of that."""
