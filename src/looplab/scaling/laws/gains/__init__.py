"""One file per gain: how many copies of itself the core is worth at (num_steps, window)."""
