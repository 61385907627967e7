"""Bodies of requests and answers as pydantic models, one file per family of endpoints.

``base`` parses bodies and words refusals, ``sampling`` holds the parameters that chats and completions share,
``structured`` the constraints, ``tools`` the tools. ``answers`` describes answers for the OpenAPI document.
Routes and answers import this room; it imports only ``quoting``.
"""
