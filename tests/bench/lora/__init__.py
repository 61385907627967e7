"""Measurements of embedding models."""
