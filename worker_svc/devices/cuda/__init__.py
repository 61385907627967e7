"""Device cuda.

`device` captures CUDA graphs. `triton_attention`, `triton_quantized` and `lora_stack` contain and launch our
Triton kernels.
"""
