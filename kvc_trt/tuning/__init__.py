"""Choose a policy for a user's own questions and memory: candidates, rounds that narrow them down, and the choice."""
