"""The layer around every HTTP request: connections, bodies, request ids, the access log and errors.

``listeners`` opens the ports and reads their certificates. ``protocol`` bounds a connection and keeps it to
HTTP/1.1. ``middleware`` wraps the application; ``bodies`` bounds and decodes request bodies for it, and
``tracing`` writes its spans. ``errors`` turns the error tree into OpenAI's statuses and bodies.
``event_streams`` writes the headers and comments of streams. This room imports only ``metrics`` and the
settings.
"""
