"""The operators of linear layers (Gated DeltaNet): over many tokens, and over one."""
