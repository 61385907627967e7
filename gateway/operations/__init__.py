"""Routes of operators and their tools: health, metrics, settings, caches, and the pages of the API.

``health`` has the probes, ``routes`` the rest, ``pages`` the documentation, and ``unserved`` the reasons for
routes of vLLM's that are missing. The application imports this room; it imports the room of the routes and
those below.
"""
