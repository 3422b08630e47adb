"""The report of an accuracy measurement: the rules of evidence, figures, and an HTML page."""
