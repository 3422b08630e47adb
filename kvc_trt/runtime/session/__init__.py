"""Sessions: rows that join a running batch, advance together, take turns and leave."""
