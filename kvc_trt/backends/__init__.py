"""The backends, which build and run engines: one folder each, with an object in `backend.py` for `registry`."""
