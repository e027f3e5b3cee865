"""What the cells recorded, and what it says: outcomes, tests, tables, the page."""
