"""The papers' tables: seven question sets, methods, averages, answers that are kept, and their comparison."""
