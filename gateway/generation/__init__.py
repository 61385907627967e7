"""From a checked request to its answer, on one push road for all protocols.

``chat_prompts`` and ``request_builder`` turn bodies into token ids and wire requests; ``answer_plan``
decides how a chat answer is constrained and read. ``respond`` submits the requests. ``generation`` and
``sequence_text`` turn events into text and counts, ``answer_reader`` separates thinking, content and calls,
``logprobs`` writes log-probabilities, and ``streaming`` sends the answer through its protocol's writer.
``context`` holds the objects shared by all routes. The rooms of protocols import this room; it imports
tools, parsers, scheduler_client, text, schemas, auth and http.
"""
