"""The client of the scheduler: one Connect stream for all requests, unary calls, and the served model.

``client`` is the entrance. ``connection`` keeps the stream open; ``in_flight`` and ``pending_request`` hold
its requests. ``startup_queue`` bounds the new requests that wait for a scheduler. ``pool_calls`` sends
inputs of pooling models, and ``served_model`` follows the model that is served. Generation, routes and the
composition root import this room; it imports text and http.
"""
