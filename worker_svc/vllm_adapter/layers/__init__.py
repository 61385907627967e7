"""Layers of vLLM's models on our kernels.

`cpu_layers` has linear layers, norms and the like, `quantized_linear` linear layers with quantized weights,
`lora` those with adapters, `mla` DeepSeek's attention, `moe` experts. The adapter's other modules import each
when a model or a device needs it.
"""
