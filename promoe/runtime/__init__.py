"""One patched model: patch, from_pretrained, the handle, the hot path."""
