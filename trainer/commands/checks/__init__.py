"""`unspiral doctor`: checks of a machine, and what to do about their findings."""
