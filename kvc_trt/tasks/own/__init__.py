"""Questions of one's own: a file of them, how their answers are scored, and data sets that others publish."""
