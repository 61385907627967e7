"""OpenAI's Responses API: ``/v1/responses``, without a store.

``schemas`` and ``input_items`` hold its bodies and answers; ``routes`` turns a body into a chat request,
and ``writer`` writes the answer, whole or as events. The application imports this room; it imports the room
of the routes and those below.
"""
