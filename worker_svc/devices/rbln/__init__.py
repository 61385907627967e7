"""Device rbln.

`device` hands whole graphs to the vendor's compiler, or to `check_backend`, which checks them and runs
them on a CPU. `ops` has the attention operators that the compiler lowers, with references that run on a
CPU.
"""
