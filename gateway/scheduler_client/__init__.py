"""The client of the scheduler: one Connect stream for all requests, unary calls, and the served model.

``client`` is the entrance and keeps the stream open; ``in_flight`` holds its requests, and the new ones
that wait for a scheduler. ``pool_calls`` sends inputs of pooling models, and ``served_model`` follows the
served model. Generation, routes and the composition root import this room; it imports text and http.
"""
