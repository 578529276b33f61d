"""A whole model of Transformers: open it, hook it, observe its passes, and restore it."""
