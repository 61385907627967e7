"""Parsers of thinking and tool calls in streamed text.

``events`` defines their events and interface, ``formats`` the formats of calls as data, ``machine`` the
parser that reads an entry, with a reader for each form of a call (``json_call``, ``named_call``,
``tagged_call``, ``python_call``). Tools and answers import this room; it imports nothing of the gateway.
"""
