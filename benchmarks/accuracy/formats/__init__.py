"""What 8 and 4 bits cost beside what policies cost, at equal bytes."""
