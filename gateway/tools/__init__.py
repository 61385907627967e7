"""Tool calls and constrained answers: formats, grammars and prompts.

``formats`` pairs each format's parser with its grammar, ``tags`` writes structural tags,
``answer_constraint`` places a client's constraint inside one, ``prompting`` describes tools in words,
``vllm_parsers`` adapts parsers of an installed vLLM, and ``skipped_tools`` reports tools other than
functions. Answers, routes and the composition root import this room; it imports parsers and text.
"""
