"""Embeddings, scores, classes and other results of pooling models.

``routes`` holds the routes, ``schemas`` the types of bodies and answers. ``call`` makes token ids of texts
and pairs and asks the scheduler for results, whose numbers ``encoding`` writes. The application imports
this room; it imports the room of the routes and those below.
"""
