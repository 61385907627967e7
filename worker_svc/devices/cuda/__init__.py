"""Device cuda.

`device` captures CUDA graphs, `triton_attention` chooses each launch of paged attention,
`triton_kernels` has the kernels.
"""
