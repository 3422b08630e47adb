"""What turns the shared checkpoint into the file that one engine reads; each runs in the environment of that engine."""
