"""Bodies of requests: the parts shared by protocols, and the chat request that all of them become.

The rooms of protocols, generation and tools import this room; it imports nothing of the gateway but
``quoting``.
"""
