"""The link to the scheduler: one Connect stream for all requests, unary calls, and the served model.

``client`` is the entrance. ``connection`` keeps the stream open; ``request_table`` and ``pending_request``
hold its requests, and the messages that wait to be sent. ``parking`` bounds the new requests that wait for a
scheduler. ``pool_calls`` and ``tokenizer_download`` are the larger calls. ``served_model`` follows the model
that is served. Answers, routes and the composition root import this room; it imports text and http.
"""
