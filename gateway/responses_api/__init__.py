"""OpenAI's Responses API: ``/v1/responses``, without a store.

``request``, ``input_items`` and ``tools`` are its request body, and ``conversion`` turns that into the chat
request that the rest of the gateway answers. ``output_items`` builds the items of an answer from the events
of its text, ``answer_body`` writes the response object, and ``response_stream_writer`` the events of a
stream. ``answers`` describes them for the OpenAPI document, and ``routes`` joins them. The application
imports this room; it imports routes and what is below them.
"""
