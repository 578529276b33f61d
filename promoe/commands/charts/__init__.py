"""Parts of the report: words, charts, page. Read-only: they know statistics, not models, engines or torch."""
