"""Which policy, on one's own questions, in one's own memory: candidates, how they are narrowed down, and the choice."""
