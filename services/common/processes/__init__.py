"""This process and its neighbours: signals, stacks, semaphores."""
