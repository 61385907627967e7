"""Answers: from the scheduler's events to the bytes that a client reads.

``answer_plan`` decides how a chat answer is constrained and read. ``generation`` and ``sequence_text`` turn
events into text and counts, ``answer_reader`` and ``delta_reader`` separate thinking, content and calls,
``logprobs`` writes log-probabilities. ``streaming`` sends a stream through its protocol's writer; ``chunks``
and ``chat_stream_writer`` write those of OpenAI's completions. The routes import this room; it imports tools,
parsers, scheduler_link, text, schemas and http.
"""
