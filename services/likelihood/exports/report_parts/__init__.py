"""What a report holds beside its curves: trajectories token by token, the figures of the LLDS paper."""
