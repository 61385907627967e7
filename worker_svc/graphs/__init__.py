"""Static graphs: recorded, replayed or compiled, and cached."""
