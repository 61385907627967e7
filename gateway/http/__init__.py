"""The layer around every HTTP request: connections, bodies, request ids, the access log and errors.

``listeners`` opens the ports and reads their certificates. ``protocol`` bounds a connection and keeps it to
HTTP/1.1. ``middleware`` wraps the application, logs and traces; ``bodies`` bounds and decodes request bodies
for it. ``errors`` turns the error tree into OpenAI's errors. ``openapi`` reads bodies for the routes. This
room imports ``schemas``, ``metrics`` and the settings.
"""
