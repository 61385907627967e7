"""Embeddings, scores, classes and other results of pooling models.

``routes`` and ``scoring`` hold the routes, ``bodies`` and ``answers`` their types. ``inputs`` makes token ids
of texts and pairs, ``call`` asks the scheduler for results, ``encoding`` writes their numbers and
``similarity`` compares them. The application imports this room; it imports the room of the routes and those
below.
"""
