"""API keys: who calls, what the caller may do, and how much.

``key_file`` reads the file of keys; ``key_ring`` holds all keys and finds the one that a request shows;
``caller`` says what a key means for a request: tenant, priority, cache salt, admin rights; ``limits`` bounds
a key's requests and tokens, which the ``ledger`` keeps, and ``usage`` counts them for the metrics; ``guard``
wraps the application and lets only requests with a key pass, which ``openapi`` documents. The app and the
routes import this room; it imports ``http`` and the settings.
"""
