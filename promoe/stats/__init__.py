"""Says what happened: counters, text reports, timelines, saved runs."""
