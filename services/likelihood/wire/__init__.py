"""What client and service send each other beside records: token arrays, and a run's account of itself."""
