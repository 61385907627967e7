"""Routes of operators and their tools.

``routes`` serves health, metrics, settings and caches, and advises on missing routes of vLLM's; ``tokenize``
shows the tokenizer. The application imports this room; it imports generation and the rooms below.
"""
