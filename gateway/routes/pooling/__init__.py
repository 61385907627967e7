"""Routes of pooling models: embeddings, scores, classes and raw results.

``run`` encodes inputs and asks the scheduler for their results; each other file has a family of routes.
Imported by ``gateway.app``; imports the other routes' shared parts and the rooms below.
"""
