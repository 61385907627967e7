"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``.

``schemas`` and ``blocks`` are its request bodies, and ``conversion`` turns them into the chat request that
the rest of the gateway answers. ``answer_body`` and ``message_stream_writer`` write the answer,
``error_shape`` the errors. ``routes`` joins them. The application imports this room; it imports routes and
what is below them.
"""
