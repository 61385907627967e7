"""Benches of single kernels."""
