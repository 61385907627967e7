"""The bodies of chats and completions with their common parts, and the answers of both.

Routes, and the rooms of the other protocols, import this room; it imports nothing of the gateway but
``quoting``.
"""
