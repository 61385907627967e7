"""The layer around every HTTP request: request ids, limits, the access log and error bodies.

``protocol`` bounds a connection, and ``upgrades`` keeps it to HTTP/1.1. ``middleware`` wraps the application
and writes its access log, to which routes and answers add fields. ``errors`` turns the error tree into
OpenAI's statuses and bodies; most rooms above import it. This room imports only ``metrics``.
"""
