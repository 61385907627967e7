"""The layer around every HTTP request: request ids, limits, the access log and error bodies.

``protocol`` bounds a connection, and ``upgrades`` keeps it to HTTP/1.1. ``middleware`` wraps the application
and writes its access log, to which routes and answers add fields. ``errors`` turns the error tree into
OpenAI's statuses and bodies; most rooms above import it. ``event_streams`` has the headers and comments of
streams, ``tls`` the certificates of the port, and ``tracing`` begins a request's spans. This room imports
only ``metrics`` and ``security_settings``.
"""
