"""The operators of a turn: store its tokens, attend to them, and compact the cache again."""
