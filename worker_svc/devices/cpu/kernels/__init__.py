"""Our own kernels for x86 processors with bfloat16 instructions.

`program.cpp` and its headers hold the kernels, `build` compiles and finds them, `program` joins them
into programs, `ops` registers them as PyTorch operators.
"""
