"""Answers: from the scheduler's events to the bytes that a client reads.

``answer_plan`` decides how a chat answer is constrained and read. ``generation`` turns events into text and
counts, ``answer_reader`` separates thinking, content and calls, ``logprobs`` writes log-probabilities,
``responses`` encodes and sends streams, and ``chat_stream_writer`` writes a chat's chunks. The routes import
this room; it imports tools, parsers, scheduler_link, text, schemas and http.
"""
