"""What a step leaves: its metrics, its records in the store, and a sample of its tokens."""
