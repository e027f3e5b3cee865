"""What was planned before the first run: arms, cells, and the table of the plan."""
