"""GGUF, the file format of llama.cpp: one file with weights, configuration and tokenizer, read as a checkpoint."""
