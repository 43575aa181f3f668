"""The loop and its choices: plans, states, caches, gradient windows, depth laws. Models are handed in."""
