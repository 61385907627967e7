"""Parsers of thinking and tool calls in streamed text, a file per format.

``events`` defines their events and interface, ``parser_base`` their common state machine. The
``json_*`` files read calls that are JSON objects: ``json_scan`` a value, ``json_call`` a call,
``json_call_parser`` and ``json_list`` sequences of calls. Tools and answers import this room; it imports
nothing of the gateway.
"""
