"""OpenAI's chats, completions and models: bodies, routes, chunks and answers.

The application imports this room; it imports generation and the rooms below.
"""
