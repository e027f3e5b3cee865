"""Running the cells, a few at a time, and the warm starts that they share."""
