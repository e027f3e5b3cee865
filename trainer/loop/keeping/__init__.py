"""What a run keeps between its steps: evaluations, checkpoints, and the way back to one."""
