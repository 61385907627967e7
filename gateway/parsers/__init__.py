"""Parsers of thinking and tool calls in streamed text, a file per format.

``events`` defines their events and interface, ``parser_base`` their common state machine. ``json_scan`` reads
a JSON value, ``json_call`` calls that are JSON objects. Tools and answers import this room; it imports
nothing of the gateway.
"""
