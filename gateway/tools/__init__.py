"""Tool calls: what a request offers, how the model is held to it, and how its answer is read."""
