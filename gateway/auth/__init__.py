"""API keys: identity, rights and limits of callers.

``key_store`` reads the keys, finds the key of a request, and holds a caller's rights: tenant, priority,
cache salt, admin. ``rate_limits`` counts and bounds a key's requests and tokens. ``middleware`` wraps the
application, counts for the metrics and documents the keys. The app and the routes import this room; it
imports ``http`` and the settings.
"""
