"""Tool calls and constrained answers as grammars.

``grammar`` writes them from the entries of formats, with a client's constraint inside, and ``vllm_parsers``
adapts parsers of an installed vLLM. Generation and the composition root import this room; it imports
parsers and text.
"""
