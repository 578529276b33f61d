"""`promoe doctor`: what this machine can do, what would be slow on it and why, and whether promoe answers right on it."""
