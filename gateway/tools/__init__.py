"""Tool calls and constrained answers: formats, grammars and prompts.

``formats`` pairs each format's parser with its grammar, ``tags`` writes structural tags, with a client's
constraint inside, ``vllm_parsers`` adapts parsers of an installed vLLM, and ``custom_tools`` shows functions
with one string as custom tools. Generation, the rooms of protocols and the composition root import this
room; it imports parsers and text.
"""
