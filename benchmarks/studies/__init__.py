"""The papers' studies, run here: hit rates, importance of layers, pooling, stages; each a page with plots."""
