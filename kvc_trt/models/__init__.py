"""What a model is: its architecture, its weights, where both come from."""
