"""Part of the fake plugin."""
