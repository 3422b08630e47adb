"""Files: opened and read in bounds, held from check to use, and written whole or not at all."""
