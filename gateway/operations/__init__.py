"""Routes of operators and their tools: health, metrics, settings, caches, and the pages of the API.

``health`` holds the probes, ``routes`` the rest, ``pages`` the documentation, and ``unserved`` the advice for
missing routes of vLLM's. The application imports this room; it imports the room of the routes and those
below.
"""
