"""One module per engine: `open_model(request)` loads it, and the result answers a prompt and tells the times."""
