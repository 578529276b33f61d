"""`promoe run`: one prompt, answered by a checkpoint whose experts stay on disk."""
