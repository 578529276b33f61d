"""The HTML report: its charts, words and page. It knows statistics, not models, engines or torch, and changes nothing."""
