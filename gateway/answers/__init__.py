"""Answers: from events to what the client reads."""
