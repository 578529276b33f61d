"""`promoe batch`: a file of prompts, answered many at once, into a file of answers."""
