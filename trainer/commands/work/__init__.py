"""The commands that train and evaluate: `train`, `demo`, `warm-start`, `eval`, `export`."""
