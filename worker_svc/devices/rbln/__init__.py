"""Device rbln.

`device` hands whole graphs to the vendor's compiler, or to `check_backend`, which checks and runs them on a
CPU. `operators` contains the attention operators of the compiler, with references for a CPU.
"""
