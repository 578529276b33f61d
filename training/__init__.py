"""Training: from routing traces to predictors that `promoe.patch` uses. The command is `promoe-train`; see `cli`."""
