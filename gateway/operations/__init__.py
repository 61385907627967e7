"""Routes of operators and their tools.

``routes`` serves health, metrics, settings and caches, and advises on missing routes of vLLM's; ``pages``
serves the documentation. The application imports this room; it imports the room of the routes and those
below.
"""
