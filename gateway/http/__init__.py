"""The layer around every HTTP request: request ids, body limits, the access log and error bodies.

``middleware`` wraps the application, ``access_log`` collects the fields of a request's log line, and
``errors`` turns the error tree into OpenAI's statuses and bodies. Most rooms above import ``errors`` or
``access_log``; this room imports only ``metrics``.
"""
