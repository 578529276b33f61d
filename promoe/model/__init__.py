"""A whole model of Transformers: open, hook, observe, give back."""
