"""Embeddings, scores, classes and other results of pooling models.

``routes`` and ``scoring`` hold the routes, ``schemas`` the types of bodies and answers. ``inputs`` makes
token ids of texts and pairs, ``call`` asks the scheduler for results, ``encoding`` writes their numbers. The
application imports this room; it imports the room of the routes and those below.
"""
