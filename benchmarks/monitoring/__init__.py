"""What the likelihood store, its pages and the timeline of a step cost."""
