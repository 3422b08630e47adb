"""`retrieval-text`: a small Llama that answers the text tasks it was trained on: needles and lines."""
