"""A model on a device: executes plans, samples tokens, never decides."""
