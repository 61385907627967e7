"""A model's files: found, checked and converted."""
