"""Benches of a whole GPU, with a model of Llama 3.2 1B's shape and made-up weights."""
