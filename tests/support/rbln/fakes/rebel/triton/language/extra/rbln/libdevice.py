"""Functions that only kernels and their wrappers call."""
