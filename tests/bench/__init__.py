"""Measurements behind the figures in the documentation. Each ends with one line of JSON."""
