"""Our own kernels for x86 processors with bfloat16 instructions, and the programs that a graph makes of them.

``program.cpp`` and its headers are the kernels, ``build`` compiles and finds them, ``program`` puts them together, ``ops`` makes them
operators of PyTorch.
"""
