"""One MoE layer: finding it, and running it over slots."""
