"""Rewrites of schemas and expressions into the part of xgrammar that enforces them."""
