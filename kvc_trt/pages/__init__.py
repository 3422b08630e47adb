"""Parts of result pages: one HTML file that needs nothing else, and charts as SVG text."""
