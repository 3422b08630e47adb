"""Write a profile as findings, files and an HTML page."""
