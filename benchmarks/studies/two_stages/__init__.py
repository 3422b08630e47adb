"""RocketKV, stage by stage: what each keeps and reads, and what that costs."""
