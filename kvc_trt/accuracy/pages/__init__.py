"""The report of an accuracy measurement: what counts as evidence, figures, and an HTML page."""
