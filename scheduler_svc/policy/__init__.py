"""Replaceable decisions: which work a step does, and who gives way when memory runs out."""
