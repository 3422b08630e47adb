"""What builds and runs engines: one folder per backend, each with its object in `backend.py`; `registry` finds them."""
