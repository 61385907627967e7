"""Parsers of what models write: tool calls and thinking."""
