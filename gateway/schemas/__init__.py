"""Bodies of requests: the parts shared by protocols, and the chat request that all of them become.

The rooms of protocols, generation, tools and text import this room; it imports nothing of the gateway.
"""
