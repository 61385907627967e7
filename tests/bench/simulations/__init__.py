"""Benches of policies: they drive the real scheduler and caches over many requests.

There is no model and no other process.
"""
