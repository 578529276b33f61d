"""`promoe report`: a page from runs that were saved, one of them or several set side by side."""
