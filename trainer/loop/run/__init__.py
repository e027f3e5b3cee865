"""A run as it stands: its parts, its folder, its progress, and the state that its checkpoints hold."""
