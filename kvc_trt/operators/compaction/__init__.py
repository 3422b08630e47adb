"""The operators that compact the cache of a prompt."""
