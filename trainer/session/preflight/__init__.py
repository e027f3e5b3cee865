"""Checks before anything slow starts: each raises one line that names the key, and what helps."""
