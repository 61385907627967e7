"""Routes for operators: probes, metrics, what runs here, caches, and the pages of the API's documentation.

``probes`` and ``metrics`` are open to all; ``rights`` says which requests may use the others. Imported by
``gateway.app``; imports the other routes' shared parts and the rooms below.
"""
