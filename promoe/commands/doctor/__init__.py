"""`promoe doctor`: what this machine is and can do, what would be slow on it and why, and whether promoe is right on it."""
