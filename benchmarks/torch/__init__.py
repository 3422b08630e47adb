"""Speed and verification of the torch backend on a GPU."""
