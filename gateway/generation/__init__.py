"""From a checked request to its answer, on one push road for all protocols.

``request_builder`` turns bodies into token ids and wire requests, and ``answer_plan`` decides how a chat
answer is constrained and read. ``respond`` has the objects shared by all routes, and submits the requests.
``sequence_text`` and ``generation`` turn events into text, counts and log-probabilities, which
``streaming`` sends through the writer of a protocol. The rooms of protocols import this room; it imports
tools, parsers, scheduler_client, text, schemas, auth and http.
"""
