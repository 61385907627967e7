"""Benches of single kernels: attention over paged blocks, and sampling."""
