"""Ray's own processes: they may not come up, and may die under a run."""
