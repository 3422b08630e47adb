"""Chat: a model's template turns messages into a prompt, and a conversation reads only the new part of it."""
