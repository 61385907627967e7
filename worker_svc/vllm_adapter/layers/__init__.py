"""Layers of vLLM's models on our kernels: `cpu_layers`, `latent_attention`, and experts in `cpu_moe` and
`static_moe`.

The adapter's other modules import one when a model or a device needs it.
"""
