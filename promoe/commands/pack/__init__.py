"""`promoe pack`: a checkpoint whose experts are packed once for the processor at hand."""
