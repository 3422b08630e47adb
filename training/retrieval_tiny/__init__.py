"""`retrieval-tiny`: a small Llama that looks up key-value records in filler."""
