"""Ways to keep weights in fewer bits in a checkpoint's files, and how each becomes a plain tensor again."""
