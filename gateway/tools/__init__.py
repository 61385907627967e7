"""Tool calls and constrained answers as grammars.

``grammar`` writes them from the entries of formats, with a client's constraint inside. Generation imports
this room; it imports parsers.
"""
