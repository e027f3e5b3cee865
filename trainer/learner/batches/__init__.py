"""Which tokens are computed together: micro-batches by a token budget, and a selection of rows."""
