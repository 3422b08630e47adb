"""The rules of the methods, one file each: which tokens of a prompt stay, and which ones a step reads."""
