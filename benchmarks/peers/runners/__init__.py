"""One module per engine: `Model(request)` loads the artefact, answers a prompt and tells the times."""
