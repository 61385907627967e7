"""Tool calls and constrained answers: formats, grammars and prompts.

``formats`` has each format's parser and grammar, with a client's constraint inside, and ``vllm_parsers``
adapts parsers of an installed vLLM. Generation and the composition root import this room; it imports
parsers and text.
"""
