"""Scientific comparisons: models, budgets and peers, recorded as JSON lines."""
