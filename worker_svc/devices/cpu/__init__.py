"""Device cpu.

`device` chooses between our own kernels (the folder `kernels`) and the compiled kernels of vLLM's CPU
wheel.
"""
