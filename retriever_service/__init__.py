"""The search service. Stands alone: it imports nothing of the trainer, and needs neither torch nor Ray for
BM25."""
