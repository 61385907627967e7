"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``.

``schemas`` holds its bodies and answers; ``routes`` turns a body into a chat request, and ``writer`` writes
the answer, whole or as events, and the errors. The application imports this room; it imports the room of
the routes and those below.
"""
