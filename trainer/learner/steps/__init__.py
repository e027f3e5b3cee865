"""What surrounds an optimiser step: its rate, and what undoes one for which memory ran out."""
