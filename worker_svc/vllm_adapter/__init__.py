"""Everything that imports vLLM; the rest of the worker never does.

``engine`` loads models and runs them, ``platform`` and ``attention`` are what vLLM finds of us, ``cpu_layers`` are faster forms of
some layers. This file imports none of them: vLLM itself imports ``platform`` while it is half imported.
"""
