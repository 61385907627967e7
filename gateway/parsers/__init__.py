"""Parsers that find thinking and tool calls in streamed text, one file per format.

``events`` defines what they yield and their interface, and ``parser_base`` the state machine they share. The
``json_*`` files read calls that are JSON objects: ``json_scan`` a value, ``json_call`` a call,
``json_call_parser`` and ``json_list`` sequences of calls. Tools and answers import this room; it imports
nothing of the gateway.
"""
